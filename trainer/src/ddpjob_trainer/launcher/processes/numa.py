"""Bind a training process to the CPUs near its GPU: torchrun's --numa-binding.

A fresh process runs this module, which becomes the program. torch opens the GPU to ask where it is:
the launcher must never hold one, nor a spare before its script has chosen its GPUs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

from ddpjob_contract import ExitCode
from ddpjob_trainer.environment import NUMA_BINDING
from ddpjob_trainer.printing import warn


def bind(env: Mapping[str, str]) -> None:
    """Bind this process as its launcher asks; end it where torch cannot, as no restart helps."""
    if not (mode := env.get(NUMA_BINDING)):
        return
    try:
        binding = importlib.import_module("torch.numa.binding")
        # Not public: where a version of torch lacks it, the refusal below says so.
        binding._maybe_apply_numa_binding_to_current_process(
            gpu_index=int(env["LOCAL_RANK"]),
            numa_options=binding.NumaOptions(binding.AffinityMode(mode)),
        )
    except Exception as error:
        warn(
            f"--numa-binding {mode}: torch cannot bind this process: {error}. It needs a GPU for"
            " each process and the program numactl in the image; else leave the option out"
        )
        sys.exit(ExitCode.BAD_CONFIG)


if __name__ == "__main__":
    bind(os.environ)
    os.execvp(sys.argv[1], sys.argv[1:])
