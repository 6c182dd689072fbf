"""Start runs, kill them, read their records, compare and report: audit, chaos and gpu-check do so.

Only `probe` and `trials` import torch: they run in the processes that train.
"""
