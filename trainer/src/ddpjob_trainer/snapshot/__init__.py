"""Snapshots: format (state <-> tensors and JSON), store (commit, load, retention), lineage.

disk holds the few durable file operations that all of them use.
"""
