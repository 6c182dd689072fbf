"""Keep what is known of each failure beside the snapshots, and read it when all pods are gone.

In: the launcher's reports/evidence collects -> bounds cuts -> writer (a thread) -> folder (disk,
retention). Out: commands (`ddpjob-trainer evidence`) -> incidents -> folder. Never imports torch.
"""
