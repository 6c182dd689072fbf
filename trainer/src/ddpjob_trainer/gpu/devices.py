"""Count GPUs by the file system and the environment, without loading a driver.

The launcher and `gpu-check` call it, and accelerator.py for its error messages.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEV = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MODULE = Path("/proc/driver/nvidia/version")
#: Not nvidiactl and the like, which the driver alone makes.
_NVIDIA = re.compile(r"nvidia\d+")
#: AMD's one file for all GPUs, a laptop's graphics too: with it there may be one.
_AMD = "kfd"
#: CUDA's driver opens these when it is initialised; NVML's count of GPUs does not.
_DRIVER = ("/dev/nvidia-uvm", "/dev/kfd")
#: A container runtime's value for no GPU, or for any number.
_NO_GPUS = ("", "all", "none", "void")


def count() -> int:
    """Return how many NVIDIA GPUs this container has."""
    return sum(_NVIDIA.fullmatch(name) is not None for name in _names())


def any_here() -> bool:
    """Return whether this container may have a GPU of any kind."""
    return count() > 0 or _AMD in _names()


def visible(env: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs CUDA would show to a process with this environment."""
    chosen = env.get(_VISIBLE)
    if chosen is None:
        return count()
    names = [name for name in chosen.split(",") if name.strip()]
    return len(names[: names.index("-1")] if "-1" in names else names)


def given(env: Mapping[str, str]) -> bool:
    """Return whether this container has NVIDIA GPUs, not hidden, whatever torch can use."""
    if _VISIBLE in env and not visible(env):
        return False
    return count() > 0 or env.get("NVIDIA_VISIBLE_DEVICES", "") not in _NO_GPUS


def misnamed(env: Mapping[str, str]) -> str:
    """Return the first name in CUDA_VISIBLE_DEVICES if that GPU is missing, else ""."""
    first = env.get(_VISIBLE, "").partition(",")[0].strip()
    return first if first.isdigit() and int(first) >= count() > 0 else ""


def driver_version() -> str:
    """Return NVIDIA's driver version from its kernel module, such as 570.86.15, or ""."""
    try:
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", _MODULE.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def driver_opened(pid: str = "self") -> str:
    """Return a GPU driver's file that a process has open, "" for none. A context opens one."""
    for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # of the descriptor of the listing itself
            if (target := os.readlink(f"/proc/{pid}/fd/{fd}")) in _DRIVER:  # noqa: PTH115
                return target
    return ""


def _names() -> list[str]:
    try:
        return os.listdir(_DEV)  # noqa: PTH208
    except OSError:
        return []
