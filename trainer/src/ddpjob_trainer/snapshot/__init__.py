"""Make snapshots beside training, and go on from them.

manager: a run's snapshots, called by the loop. Out: training_state (capture) -> save/ (layout,
writer, parts) -> ondisk/ (data files, then the manifest); remote/ copies what is durable to an
object store. Back: remote/ -> restore/ (resume, load) -> training_state; origin compares the run
with the one before. For people: reader, weights.
"""
