"""The program of its first argument, with torch.compile's graphs not cut at DDP's buckets."""

from __future__ import annotations

import runpy
import sys

import torch._dynamo

import ddpjob_trainer  # noqa: F401 - by it the launcher knows that it reports its steps

torch._dynamo.config.optimize_ddp = False
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
