"""Report a launcher's work: /state, /metrics and events, then the termination report."""
