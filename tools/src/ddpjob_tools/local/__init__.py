"""Run a DDPJob manifest on one machine, without a cluster: `ddpjob local`.

command -> manifest (what is written) -> job and mounts (what is started here) -> attempts
(processes, and the restarts that the operator would make, as restarts decides).
"""
