"""Fills the status besides decisions."""
