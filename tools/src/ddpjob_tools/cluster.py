"""Hand over to the kubectl plugin: `ddpjob status` is `kubectl ddp status`.

One program to know on a laptop. It imports neither the trainer nor the tools, for that takes longer
than the plugin itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from ddpjob_contract import ExitCode

_PLUGIN = "kubectl-ddp"
#: Its commands in its own words: a test compares.
COMMANDS = {
    "run": "a script to its end: job, phase, logs, result",
    "cp": "results from the job's volume to this machine",
    "init": "print the DDPJob manifest for a script",
    "status": "all jobs, or one with the table of its gang",
    "why": "why a job failed, on one page, newest first",
    "logs": "logs of all replicas, each line with its pod",
    "events": "the story of a job and its pods: Events and failures",
    "account": "where the job's pod-hours went, its goodput and its end",
    "stacks": "where each process is now: its stacks",
    "profile": "a profile of one rank's next steps",
    "suspend": "remove the pods and keep the job",
    "resume": "start a suspended job again, from its newest snapshot",
    "snapshots": "the snapshots of a job, looked up in one of its pods",
}
#: kubectl's, which may come before a command.
_FLAGS = ("-n", "--namespace", "--context", "--kubeconfig")


def asked(words: Sequence[str]) -> bool:
    """Return whether the plugin is to do it."""
    return bool(words) and words[0].partition("=")[0] in (*COMMANDS, *_FLAGS)


def hand_over(words: Sequence[str]) -> int:
    """Become the plugin; return an exit code where it is not there."""
    if importlib.util.find_spec("kubectl_ddp"):  # beside us, whatever the PATH has
        # Without -P a script's folder would come first on the path.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "kubectl_ddp", *words])
    try:
        os.execvp(_PLUGIN, [_PLUGIN, *words])
    except OSError as error:
        print(
            f"ddpjob {words[0]}: needs {_PLUGIN} on PATH ({error.strerror}): pip install"
            " kubectl_ddp-*.whl, or copy the file kubectl-ddp there; a release has both, `make"
            " wheel` and `make plugin` make them (docs/reference/plugin.md)",
            file=sys.stderr,
        )
    return ExitCode.NOT_FOUND
