"""Judge a loss: its cause, what follows, what it is charged to."""
