"""The launcher: PID 1 of a trainer pod, or a local stand-in for one. Never imports torch.

plan (what to start) -> supervisor (start, watch, stop) -> verdict (who failed first) -> report.
"""
