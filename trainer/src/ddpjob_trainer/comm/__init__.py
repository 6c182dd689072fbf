"""Connect the ranks: rendezvous, the group and its small exchanges, leaving it."""
