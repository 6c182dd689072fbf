"""Print what a rank says to people."""

from __future__ import annotations

import sys


def say(rank: int, text: str) -> None:
    """Print one line to the log of this rank."""
    who = f"rank {rank}: " if rank else ""
    print(f"ddpjob: {who}{text}", file=sys.stderr, flush=True)
