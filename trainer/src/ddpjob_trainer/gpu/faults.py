"""Recognize a failed GPU, or an end by NCCL, by messages instead of types.

The messages are those of cudaGetErrorString, of the driver and of torch's ProcessGroupNCCL. Never
imports torch.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from ddpjob_contract import ExitCode

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
