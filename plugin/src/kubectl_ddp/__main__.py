"""Enter the command: from its script, `python -m kubectl_ddp` or the single file."""

from __future__ import annotations

import signal
import sys

_INTERRUPTED = 130
_TERMINATED = 143


def main() -> int:
    """Run the command line; return the exit code."""
    # The single file starts with whatever python3 is: only this checks its version.
    if sys.version_info < (3, 11):  # noqa: UP036
        print("kubectl-ddp: Python 3.11 or newer is needed on PATH as python3", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, _end)
    try:
        from kubectl_ddp import cli

        return cli.run(sys.argv[1:])
    except KeyboardInterrupt:  # while it imports
        return _INTERRUPTED


def _end(*_: object) -> None:
    """Raise on SIGTERM, so that no kubectl is left behind."""
    raise SystemExit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
