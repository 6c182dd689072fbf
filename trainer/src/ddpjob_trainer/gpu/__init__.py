"""Compute on a GPU: streams and memory, counting devices, telling a GPU's errors."""
