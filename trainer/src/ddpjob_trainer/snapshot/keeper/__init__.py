"""The process beside each rank that writes snapshots while the rank trains on. No torch."""
