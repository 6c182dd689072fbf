"""The API server as a few verbs: the session, its credentials, its JSON, its errors."""
