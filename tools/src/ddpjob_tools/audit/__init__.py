"""Run any script undisturbed, then killed and started again; find the first step that differs."""
