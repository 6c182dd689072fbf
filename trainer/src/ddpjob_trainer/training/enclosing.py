"""Looks at the script's loop over the steps: how it is left, and whether one stands around it.

What another loop around it counts, as one over epochs, begins anew.
After a resume the steps go on in the midst of an epoch, but ``for epoch in range(10)`` begins with
epoch 0, and what comes at an epoch's end, as a scheduler's step, at other steps than before.
"""

from __future__ import annotations

import dis
import inspect
import sys
from types import FrameType

from ddpjob_trainer.data.generators import is_library

#: Of a method's name that is called: Python 3.11's, and what later ones show beside the name.
_METHOD, _CALLED = "LOAD_METHOD", "NULL"


def warning(line: int) -> str:
    """Return what the user is told of that loop."""
    return (
        f"warning: the loop over run.steps() stands within another one, in line {line}, which"
        " begins anew after a resume, while the steps go on in the midst of an epoch: what it"
        " counts, and what comes at an epoch's end, then come at other steps. Go through"
        " run.steps() in one loop: step.epoch is the epoch, which ends where (step.index + 1) %"
        " ddp.steps_per_epoch(dataset, global_batch) is 0"
    )


def find_enclosing(frame: FrameType | None) -> int | None:
    """Return the line of a loop around the for loop that ``frame`` stands at; None: there is none.

    One in which run.steps() is called is none, as over folds, each with a run of its own. Callers
    are looked at as well, up to where the steps begin.
    """
    own = True
    while frame is not None:
        ours = frame.f_globals.get("__name__", "").startswith("ddpjob_trainer")
        if ours or is_library(frame.f_code.co_filename):
            return None
        code = list(dis.get_instructions(frame.f_code))
        at = _begin_of(code, frame.f_lasti)
        begun = max((one.offset for one in code if _begins_steps(one, at)), default=-1)
        for one in code:
            around = "JUMP_BACKWARD" in one.opname and one.offset > at >= one.argval + own
            if around and begun < one.argval:
                return _line(frame, one.argval)
        if begun >= 0:
            return None
        own, frame = False, frame.f_back
    return None


def is_unwound() -> bool:
    """Whether the loop whose generator is being closed is left by an error, not by a break.

    Nothing else tells: the error is not yet handled, and the generator hears of neither. A break
    or return drops the generator by an instruction of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = frame.f_globals.get("__name__", "").startswith("ddpjob_trainer")
        if not (ours or code.co_flags & inspect.CO_GENERATOR):  # as tqdm, which passes steps on
            at = [one.opname for one in dis.get_instructions(code) if one.offset == frame.f_lasti]
            return not at or not at[0].startswith("POP_")
        frame = frame.f_back
    return False


def _begin_of(code: list[dis.Instruction], at: int) -> int:
    """Where the instruction begins that stands here, the parts of a large argument included."""
    before = [one for one in code if one.offset <= at]
    begin = before.pop()
    while before and before[-1].opname == "EXTENDED_ARG":
        begin = before.pop()
    return begin.offset


def _begins_steps(one: dis.Instruction, at: int) -> bool:
    """Whether a method of this name is called there, before ``at``."""
    called = one.opname == _METHOD or _CALLED in one.argrepr
    return one.argval == "steps" and called and one.offset < at


def _line(frame: FrameType, offset: int) -> int:
    lines = [line for start, _, line in frame.f_code.co_lines() if start <= offset and line]
    return lines[-1] if lines else frame.f_lineno
