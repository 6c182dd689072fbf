"""Keep the operator's knowledge of the cluster."""
