"""Turn any object's state into tensors and JSON (codec); handle kinds that need care."""
