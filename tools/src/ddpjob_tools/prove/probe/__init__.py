"""Record each step of a training process, from within: `python -m ddpjob_tools.prove.probe`.

__main__ runs the script, recorder has the hooks and looks for files, fingerprint hashes. They
and no other part of audit import torch; they know nothing of the rest, which reads their lines.
"""
