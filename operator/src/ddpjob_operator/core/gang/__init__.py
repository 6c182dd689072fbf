"""Change the gang: start it, restart it, replace pods, end it."""
