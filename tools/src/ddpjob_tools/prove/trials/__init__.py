"""Hold what gpu-check starts under a launcher: small trainings, and questions to the machine."""
