"""Offer the `ddpjob` command: __main__ -> cli -> audit, chaos, gpu-check, init, local; or cluster.

They drive the launcher and read what training records; nothing of the core imports them.
"""
