"""Average the gradients, with the same bits after a restart.

ddp: DistributedDataParallel, warmed up (level resume). elastic: the same bits at any world size, by
tree_reduce. determinism: pins the other sources of different bits. replica_check: compares the
ranks' parameters.
"""
