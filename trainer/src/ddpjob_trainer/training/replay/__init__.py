"""Check each restart: record steps, compare those done again, give a verdict."""
