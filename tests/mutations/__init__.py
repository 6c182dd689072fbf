"""What would be wrong with decisive lines of the product, and that a test finds each out."""
