"""Snapshots: what is in them, and how they are made and restored beside training.

manager: a run's snapshots, called by the loop. training_state -> write_plan (who writes what) ->
staging -> pipeline -> keeper (a process of its own) -> ondisk -> remote (an object store). Back:
remote -> restore (all ranks) with takeover (rank 0) -> load (bytes) -> load_state (objects). For
people: find, reader, commands.
"""
