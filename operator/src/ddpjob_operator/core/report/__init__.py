"""Report what is decided: stalls, conditions, where the time went."""
