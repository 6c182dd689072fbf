"""Count GPUs by the file system and the environment, without loading a driver.

The launcher and `gpu-check` call it, and accelerator.py for its error messages.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpjob_contract import ExitCode

# --- Devices --------------------------------------------------------------------------------------

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


# --- Faults ---------------------------------------------------------------------------------------
# The messages are those of cudaGetErrorString, of the driver and of torch's ProcessGroupNCCL.
# Never imports torch.

#: Errors that the same program does not meet on another GPU. "an illegal memory access" and
#: "device-side assert" are not among them: those are the program's.
_FAULTS = re.compile(
    "uncorrectable ECC error"
    "|uncorrectable NVLink error"
    "|unspecified launch failure"
    "|hardware stack error"
    "|CUDA-capable device.{0,12} busy or unavailable"  # "device(s) is/are", "devices are" before
    "|peer GPU memory over nvlink or a hardware error"
    "|CUDA error: unknown error"
    "|(802|CUDA error): system not yet initialized"  # the fabric manager of an NVSwitch machine
    "|has fallen off the bus"
    "|GPU is lost"
)
_XID = re.compile(r"\bXid \(PCI:[^)]*\): (\d+)")
#: Codes that NVIDIA's device plugin also attributes to the program.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
#: ProcessGroupNCCL's watchdog ends a process by SIGABRT with this.
_WATCHDOG = "thread terminated with exception"
_PEER_GONE = re.compile(
    "ncclRemoteError"
    "|remote process exited"
    "|NCCL communicator was aborted"
    "|Watchdog caught collective operation timeout"
)
_UNCAUGHT = re.compile(r"^ *what\(\): +(.+)")
_MAX_LINE = 400


def is_fault(text: str) -> bool:
    """Return whether a text reports a failed GPU."""
    if _FAULTS.search(text):
        return True
    return any(int(number) not in _XIDS_OF_PROGRAMS for number in _XID.findall(text))


def judge(status: int, exception: str, tail: Sequence[str]) -> tuple[int, str]:
    """Classify a process's end: its exit status (-n for signal n) and exception.

    ``exception``: its last one, "" if none is known. ``tail``: its last lines, oldest first. Judges
    only ends that do not explain themselves: exit code 1, and SIGABRT, by which NCCL ends a
    process.
    """
    if status not in (1, -signal.SIGABRT):
        return status, exception
    fault = next((line for line in (exception, *reversed(tail)) if is_fault(line)), "")
    if fault:
        return int(ExitCode.HARDWARE), fault.strip()[:_MAX_LINE]
    if status == 1:
        return status, exception
    words = next((found[1] for line in reversed(tail) if (found := _UNCAUGHT.match(line))), "")
    ended = next((line for line in reversed(tail) if _WATCHDOG in line), "")
    if ended and _PEER_GONE.search("\n".join(tail)):
        return int(ExitCode.PEER_LOST), (words or ended).strip()[:_MAX_LINE]
    return status, exception or words[:_MAX_LINE]
