"""How gradients are averaged, and what makes their sums the same bits after a restart.

ddp: DistributedDataParallel, warmed up (level resume). elastic: the same bits at any world size, by
shard_tree and tree_reduce. determinism: what else must be pinned. replica_check: whether the ranks
hold the same parameters.
"""
