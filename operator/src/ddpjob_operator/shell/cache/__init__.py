"""What the operator knows of the cluster."""
