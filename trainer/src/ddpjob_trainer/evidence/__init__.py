"""Keep what is known of each failure beside the snapshots, and read it when all pods are gone.

In: the launcher's reports/evidence collects -> folder. Out: commands (`ddpjob-trainer evidence`) ->
folder. Never imports torch.
"""
