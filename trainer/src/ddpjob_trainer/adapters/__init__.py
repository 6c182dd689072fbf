"""Report step, loss, checkpoints and signs of life from other trainers than ours.

The packages are imported here only, and only by the scripts that use them anyway.
"""
