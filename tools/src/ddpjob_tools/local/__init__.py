"""Run a DDPJob manifest on one machine, without a cluster: `ddpjob local`.

manifest (what is written) -> job (what is started here) -> command (processes, and the restarts
that the operator would make, as restarts decides).
"""
