"""The `ddpjob-trainer` command, also as `python -m ddpjob_trainer`.

Its first act is to make SIGTERM end it, also while it still imports. The launcher is PID 1 in a
pod, and the kernel drops signals to PID 1 that have no handler. The supervisor puts its own
handler in the place of this one.
"""

from __future__ import annotations

import os
import signal
import sys


def _end(signum: int, frame: object) -> None:
    os._exit(128 + signum)


def main() -> int:
    """Return the exit code."""
    signal.signal(signal.SIGTERM, _end)
    from ddpjob_trainer import cli  # after the handler, for this takes a while

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
