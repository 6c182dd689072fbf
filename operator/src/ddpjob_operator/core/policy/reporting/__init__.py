"""Fill the status besides decisions."""
