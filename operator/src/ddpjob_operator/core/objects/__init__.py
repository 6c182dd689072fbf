"""Read the API server's objects into slim records; text of strangers is bounded here."""
