"""The ways out of a run: together at its end, at an agreed step, by an error, by a refusal."""
