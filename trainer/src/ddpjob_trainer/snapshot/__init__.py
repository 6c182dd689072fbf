"""Snapshots: make them beside training, and go on from them.

manager: a run's snapshots, called by the loop. Out: training_state (capture) -> layout -> staging
-> writer (a thread, by ondisk/files) -> part_reports (agree) -> layout.Draft (the manifest);
remote copies what is durable to an object store. Back: remote -> resume (choose, agree, bring) ->
load (bytes) -> load_state (objects) -> training_state. For people: reader, commands, weights.
"""
