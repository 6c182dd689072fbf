"""Run the launcher: PID 1 of a trainer pod, or a local stand-in for one. Never imports torch.

launch_config (what to start) -> supervisor (the loop) -> worker_group (a round) -> reports. Whether
a round follows a failure: hub/rounds, called by the hub, which launcher 0 holds.
"""
