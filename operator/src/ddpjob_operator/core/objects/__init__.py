"""The API server's objects, read into slim records: what comes from strangers is bounded here."""
