"""GPUs as the file system and the environment show them, for programs that never load a driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEV = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MODULE = Path("/proc/driver/nvidia/version")
#: Not nvidiactl and the like, which are there with the driver alone.
_NVIDIA = re.compile(r"nvidia\d+")
#: AMD's one file for all of its GPUs, a laptop's graphics too: where it is there may be one.
_AMD = "kfd"
#: What CUDA's driver opens when it is initialised, and asking NVML for the number of GPUs does not.
_DRIVER = ("/dev/nvidia-uvm", "/dev/kfd")
#: What a container runtime says when it has given a container no GPU, or all that there may be.
_NO_GPUS = ("", "all", "none", "void")


def count() -> int:
    """How many of NVIDIA's this container has."""
    return sum(_NVIDIA.fullmatch(name) is not None for name in _names())


def any_here() -> bool:
    """Whether this container may have a GPU, of whatever kind."""
    return count() > 0 or _AMD in _names()


def visible(env: Mapping[str, str]) -> int:
    """How many of NVIDIA's CUDA would show to a process with this environment."""
    chosen = env.get(_VISIBLE)
    if chosen is None:
        return count()
    names = [name for name in chosen.split(",") if name.strip()]
    return len(names[: names.index("-1")] if "-1" in names else names)


def given(env: Mapping[str, str]) -> bool:
    """Whether this container has NVIDIA's, not hidden on purpose, whatever torch can do."""
    if _VISIBLE in env and not visible(env):
        return False
    return count() > 0 or env.get("NVIDIA_VISIBLE_DEVICES", "") not in _NO_GPUS


def misnamed(env: Mapping[str, str]) -> str:
    """The first that CUDA_VISIBLE_DEVICES names if this container has no such GPU, else ""."""
    first = env.get(_VISIBLE, "").partition(",")[0].strip()
    return first if first.isdigit() and int(first) >= count() > 0 else ""


def driver_version() -> str:
    """NVIDIA's driver as its kernel module tells it, such as 570.86.15; "" where there is none."""
    try:
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", _MODULE.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


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


def _names() -> list[str]:
    try:
        return os.listdir(_DEV)  # noqa: PTH208
    except OSError:
        return []
