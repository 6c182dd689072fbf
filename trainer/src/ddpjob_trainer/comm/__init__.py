"""The ranks' ways to talk: rendezvous, the group and its small exchanges, leaving it."""
