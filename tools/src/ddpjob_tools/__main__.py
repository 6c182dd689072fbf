"""Run the `ddpjob` command, also as `python -m ddpjob_tools`."""

from __future__ import annotations

import sys

from ddpjob_tools import cluster


def main() -> int:
    """Return the exit code."""
    if cluster.asked(sys.argv[1:]):
        return cluster.hand_over(sys.argv[1:])
    from ddpjob_trainer.__main__ import begin

    return begin("ddpjob_tools.cli")


if __name__ == "__main__":
    sys.exit(main())
