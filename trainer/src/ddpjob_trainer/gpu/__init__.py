"""Compute on a GPU: streams and memory, which devices there are, which errors are a GPU's."""
