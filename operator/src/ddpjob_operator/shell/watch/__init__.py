"""Fill the cache by lists, watches, and the launchers' /state."""
