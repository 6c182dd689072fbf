"""A package, with a file of data."""
