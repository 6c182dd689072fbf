"""Runs a script of examples/ as it stands, but no faster than asked for: it is to be disturbed.

paced.py SECONDS SCRIPT ARGUMENTS; it runs inside the trainer's image.
"""

from __future__ import annotations

import runpy
import sys
import time

from ddpjob_trainer.training.step import Step

_, pause, script, *arguments = sys.argv
_commit = Step.commit


def commit(self: Step) -> None:
    time.sleep(float(pause))
    _commit(self)


Step.commit = commit  # type: ignore[method-assign]
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
