"""Run a script as `python` does, after the hooks are registered; audit.py starts it per process.

`python -m ddpjob_tools.prove.probe ORDER script.py args`; ORDER is JSON: out, watch, stop_at,
module, shown, seed. The script sees its own arguments, its folder on sys.path, itself as __main__.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from ddpjob_tools.prove.probe.recorder import Recorder


def main(words: list[str]) -> None:
    """Register the hooks, then run the script in this process."""
    order: dict[str, Any] = json.loads(words[0])
    script, *_ = arguments = words[1:]
    first = os.environ.get("RANK", "0") in ("", "0")
    Recorder(Path(order["out"]), Path(order["watch"]), first, order["stop_at"]).start()
    if order["seed"] is not None:  # as lines at the script's head would
        for seed in (random.seed, torch.manual_seed, numpy.random.seed):
            seed(order["seed"])
    if order["module"]:
        sys.argv[:] = arguments
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = [order["shown"], *arguments[1:]]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
