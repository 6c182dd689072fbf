"""Print what a rank says to people."""

from __future__ import annotations

import sys

from ddpjob_contract.text import clean

_MOST = 16_384  # characters: a volume may have megabytes to quote


def say(rank: int, text: str) -> None:
    """Print one line to the log of this rank. It may quote what a volume or a store says."""
    who = f"rank {rank}: " if rank else ""
    print(f"ddpjob: {who}{clean(' '.join(text[:_MOST].splitlines()))}", file=sys.stderr, flush=True)
