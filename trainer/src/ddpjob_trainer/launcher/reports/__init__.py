"""Report a launcher's work: /state and /metrics while it runs, events, and the termination report."""
