"""`ddpjob-trainer chaos`: run a script undisturbed, then under kills, and compare every bit.

kills plans what is killed when, job holds the launcher, records reads what the ranks record,
disturbance makes the kills, compare compares, experiment is all of it. Never imports torch.
"""
