"""Start a gang: from a job without pods to one whose gang runs."""
