"""Report a run: progress takes its events and publishes them to all the others."""
