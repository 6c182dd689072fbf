"""Run the launcher: PID 1 of a trainer pod, or a local stand-in for one. Never imports torch.

plan (what to start) -> supervisor (the loop) -> gang (one round's workers) -> termination. Whether
a round follows a failure: hub/rounds, called by the hub, which launcher 0 holds.
"""
