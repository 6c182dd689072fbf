"""Runs a script of examples/ as it stands, with slow steps until a file is there.

slow.py FILE SECONDS SCRIPT ARGUMENTS; it runs inside the trainer's image, from the claim. Once
FILE.gpu-2 is there the GPU of rank 2 fails.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from ddpjob_trainer.training.step import Step

_, file, seconds, script, *arguments = sys.argv
_commit = Step.commit


def commit(self: Step) -> None:
    gpu = Path(f"{file}.gpu-{os.environ['RANK']}")
    if gpu.exists():
        gpu.unlink()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until and not Path(file).exists():
        time.sleep(0.05)
    _commit(self)


Step.commit = commit  # type: ignore[method-assign]
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
