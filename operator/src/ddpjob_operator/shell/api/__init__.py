"""Offer the API server as a few verbs: session, credentials, JSON, errors."""
