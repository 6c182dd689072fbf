"""Print for people, so that no text of a volume, a store or a program moves a terminal's cursor.

What commands and ranks print passes here; a launcher's own words pass launcher/output.py.
"""

from __future__ import annotations

import sys

from ddpjob_contract.text import clean


def show(*lines: str) -> None:
    """Print lines for the one who asked."""
    print("\n".join(map(clean, lines)))


def warn(text: str) -> None:
    """Print one line on what is wrong."""
    print(clean(text), file=sys.stderr)


_MOST = 16_384  # characters: a volume may have megabytes to quote


def say(rank: int, text: str) -> None:
    """Print one line to the log of this rank. It may quote what a volume or a store says."""
    who = f"rank {rank}: " if rank else ""
    print(f"ddpjob: {who}{clean(' '.join(text[:_MOST].splitlines()))}", file=sys.stderr, flush=True)
