"""One line each for trainers that are not ours: step, loss, checkpoints and hang detection.

The packages are imported here only, and only by the scripts that use them anyway.
"""
