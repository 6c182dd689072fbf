"""The check of each restart: record each step, compare the steps done again, give a verdict."""
