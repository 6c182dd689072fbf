"""Run a script undisturbed, then under kills, and compare every bit.

`ddpjob-trainer chaos`: kills plans the kills, job holds the launcher, records reads the ranks'
records, disturbance makes the kills, compare compares, experiment joins them. Never imports torch.
"""
