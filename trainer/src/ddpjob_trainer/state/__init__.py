"""State of any object as tensors and JSON (codec), and the kinds of it that need care."""
