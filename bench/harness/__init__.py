"""What every benchmark shares: options, the machine's facts, summaries, a table and JSON."""
