"""The loop of this library in a script that first imports a large library."""

import runpy
from pathlib import Path

import heavy  # noqa: F401

import ddpjob_trainer  # noqa: F401  by which the launcher sees whose it is

runpy.run_path(str(Path(__file__).with_name("ours.py")), run_name="__main__")
