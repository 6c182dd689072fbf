"""Print an error that names its cure once, with the script's line behind it.

All ranks of a launcher meet the same error, so the first one prints it. A traceback through our
code helps nobody who has mistyped an option; DDPJOB_TRAINER_TRACEBACK=1 brings it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import traceback
from pathlib import Path
from types import TracebackType

import torch

from ddpjob_trainer.environment import TRACEBACK, state_directory, wants_traceback
from ddpjob_trainer.errors import ConfigError, HardwareError
from ddpjob_trainer.telemetry.console import say

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
#: What calls our hooks, and enters our context managers.
_BETWEEN = ("<", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
#: A child process says so, and its rank, which then meets something else, ends by it.
UNGUARDED = (
    "a child process that was started by spawn or forkserver, as of a DataLoader, reads the script"
    " from its first line and is at ddp.start() again: put what trains below `if __name__ =="
    ' "__main__":`'
)


def tell(rank: int, error: BaseException, trace: TracebackType | None) -> bool:
    """Say such an error in one line; False: nothing was said, the traceback is wanted."""
    if not isinstance(error, ConfigError | HardwareError) or wants_traceback(os.environ):
        return False
    text = _worded(error)
    if _is_first(text):
        say(rank, f"{text}{_place(trace)} ({TRACEBACK}=1 shows the traceback)")
    return True


def _is_first(text: str) -> bool:
    """Tell whether no other rank of this launcher has said it in this round."""
    path = _mark_of(text)
    if path is None:
        return True
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # said twice is better than not at all
    return True


def of_child() -> ConfigError | None:
    """Return what a child process of this launcher's ranks was refused for in this round."""
    error = ConfigError(UNGUARDED)
    path = _mark_of(_worded(error))
    return error if path is not None and path.exists() else None


def _worded(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _mark_of(text: str) -> Path | None:
    """Return the file that marks this as said; None without a launcher of ours."""
    directory = state_directory(os.environ)
    name = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return None if directory is None else directory / f"refusal-{name}"


def _place(trace: TracebackType | None) -> str:
    """Find the line of the script from which our code was called, perhaps through torch."""
    found = ""
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith(_OURS):
            if found:
                break
        elif not frame.filename.startswith(_BETWEEN):
            found = f" [{frame.filename}, line {frame.lineno}]"
    return found
