"""What the status says besides decisions."""
