"""Fills the cache by lists, watches, and the launchers' /state."""
