"""Read what a silent, failed or leaving node means for the pods on it."""
