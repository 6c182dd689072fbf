"""From a job without pods to one whose gang runs."""
