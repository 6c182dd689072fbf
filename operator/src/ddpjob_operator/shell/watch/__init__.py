"""What fills the cache: lists, watches, and the launchers' /state."""
