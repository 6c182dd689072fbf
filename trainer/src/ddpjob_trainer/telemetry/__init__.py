"""What a run tells: progress is told what happens and publishes it to all the others."""
