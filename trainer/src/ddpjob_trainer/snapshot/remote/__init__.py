"""Copy snapshots to an object store beside training; fetch them to a fresh disk."""
