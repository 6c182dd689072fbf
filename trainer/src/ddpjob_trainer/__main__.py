"""Run the `ddpjob-trainer` command, also as `python -m ddpjob_trainer`.

Its first act is to make SIGTERM end it, also while it still imports, and SIGINT without a
traceback. The launcher is PID 1 in a pod, and the kernel drops signals to PID 1 that have no
handler. The supervisor puts its own handlers in the place of these. `ddpjob` begins so, too.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module


def _end(signum: int, frame: object) -> None:
    os._exit(128 + signum)


def begin(module: str) -> int:
    """Run main() of a module; return the exit code."""
    signal.signal(signal.SIGTERM, _end)
    interrupted = signal.getsignal(signal.SIGINT)  # ignored, where a shell started us with &
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    cli = import_module(module)  # after the handlers, for this takes a while
    signal.signal(signal.SIGINT, interrupted)
    try:
        code: int = cli.main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def main() -> int:
    """Return the exit code."""
    return begin("ddpjob_trainer.cli")


if __name__ == "__main__":
    sys.exit(main())
