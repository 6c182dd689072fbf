"""Leave a run: at its end, an agreed step, an error, or a refusal."""
