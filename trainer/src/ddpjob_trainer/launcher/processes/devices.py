"""GPUs as the file system shows them, for programs that never load a driver."""

from __future__ import annotations

import os
from pathlib import Path

_DEV = Path("/dev")
_GPUS = ("nvidia[0-9]*", "kfd")  # kfd: AMD's
#: What CUDA's driver opens when it is initialised, and asking NVML for the number of GPUs does not.
_DRIVER = ("/dev/nvidia-uvm", "/dev/kfd")


def any_here() -> bool:
    """Whether this container was given a GPU."""
    return any(True for pattern in _GPUS for _ in _DEV.glob(pattern))


def driver_opened(pid: str = "self") -> str:
    """The GPU driver's file that a process has open, "" if none: it may hold a context."""
    for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115
        except OSError:  # that of the listing itself
            continue
        if target in _DRIVER:
            return target
    return ""
