"""`ddpjob-trainer chaos`: run a script undisturbed, then under kills, and compare every bit.

kills plans what is killed when, gang holds the launcher, watch reads what the ranks record,
driver makes the kills, verdict compares. Never imports torch.
"""
