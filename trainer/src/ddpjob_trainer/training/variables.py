"""Finds what the loop carries from step to step in variables of its own: no snapshot holds them.

Two ways. A name that the loop's body reads before it writes it is carried, whatever it holds: that
stands in the code. And what the body uses without writing it (a list, an object, a generator, what
its functions reach) is compared from look to look, as an epoch's end may change it only. It is only
told of: it may be a mere log.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import inspect
import io
import random
import re
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise, takewhile
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.data.generators import OF_ALL, SEEDED, is_library, is_the_scripts
from ddpjob_trainer.data.generators import mark as generator_mark
from ddpjob_trainer.training.hidden import is_looked_after, key

_FOR_ITER = dis.opmap["FOR_ITER"]
_CACHE = dis.opmap["CACHE"]
_FIRST_TOLD = 2  # steps, when there is something to compare
_DEPTH = 3
_MOST = 64  # entries of a list or dict, elements of an array
_WORK = _MOST**2  # parts of one value, lists of lists of lists included
_TOLD = 8
_CLOCK_SECONDS = 600.0
_BEFORE_SECONDS = 60.0  # a script may have read a clock before this was imported
_IMPORTED = time.monotonic()
_NANOSECONDS = 10**10  # of a clock; less counts something
_ALONE = 3  # references to a frame's own dict that nobody else holds: its, ours, the question's
_VARIABLE = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")
_NOTHING = "COPY", "NOP", "CACHE"
#: Begins what calls no function and goes nowhere else.
_PLAIN = *_NOTHING, "LOAD_", "STORE_", "BINARY_", "UNPACK_", "SWAP", "EXTENDED_ARG"
_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
_NEVER = (
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, type, ModuleType,
    FunctionType, MethodType,
)  # fmt: skip


class Variables:
    """Looks once per step. ``kept``: what a snapshot holds; ``hooks``: what updates call."""

    def __init__(
        self,
        kept: Callable[[], Iterable[object]],
        hooks: Callable[[], Iterable[object]],
        say: Callable[[str], None],
    ) -> None:
        self._kept = kept
        self._hooks = hooks
        self._say = say
        self._told: set[str] = set()
        self._steps = 0
        self._marks: dict[str, Any] = {}

    def step_ended(self) -> None:
        """Called from within the script's next(): its frame is one of ours' callers."""
        self._steps += 1
        if is_looked_after(self._steps):
            with looking():
                self._compare()

    def _compare(self) -> None:
        frame = frame_of_the_script()
        body = _body(frame) if frame is not None else []
        read, carried = _names(body)
        known = _Known(self._kept())
        now = dict(self._look(frame, read, known))
        marks, self._marks = self._marks, now
        changed = [name for name, mark in now.items() if marks.get(name, mark) != mark]
        if frame is not None and self._steps == _FIRST_TOLD:
            values = _values(frame, carried)
            sure = [n for n in carried if n in values and _counts(values[n], known)]
            sure += _carried_attributes(frame, body, known)
            changed = list(dict.fromkeys([*sure, *changed]))
        left_out = self._told | _made_anew(body)
        self._tell([name for name in changed if name not in left_out])

    def _tell(self, names: list[str]) -> None:
        self._told.update(names)
        if names:
            shown = ", ".join(map(repr, names[:_TOLD])) + (", ..." if names[_TOLD:] else "")
            self._say(
                f"warning: the loop carries {shown} from step to step, in variables that no"
                " snapshot holds: after a resume they begin anew. What training or its results"
                " depend on belongs into a dict that run.register(name, dict) is given, a generator"
                " into run.register(name, generator); or compute it from step.index"
            )

    def _look(
        self, frame: FrameType | None, read: list[str], known: _Known
    ) -> Iterator[tuple[str, Any]]:
        found = _values(frame, read) if frame is not None else {}
        for hook in self._hooks():
            name = getattr(hook, "__name__", type(hook).__name__)
            found.setdefault(name, hook)
        seen: set[int] = set()
        for name, value in found.items():
            with looking():  # at this one; what it raises hides no other
                for path, part in _reached(name, value, seen, _DEPTH, known):
                    mark = known.mark(part)
                    if mark is not None:
                        yield path, mark


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """The script's objects may be anything, and to be looked at must not end a training.

    What a handler of a signal raises meanwhile is for the script, as torch's for a dead worker is.
    """
    try:
        yield
    except Exception as error:
        codes = {getattr(handler, "__code__", None) for handler in _handlers()}
        if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise


def _handlers() -> Iterator[Any]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            yield from (handler, type(handler).__call__)


# --- The script's code -----------------------------------------------------------------------


def frame_of_the_script() -> FrameType | None:
    """The innermost that stands at a for loop, is not ours, and does not only pass steps on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = frame.f_globals.get("__name__", "").startswith("ddpjob_trainer")
        passes_on = code.co_flags & inspect.CO_GENERATOR  # as tqdm does
        if not (ours or passes_on) and code.co_code[_at(frame)] == _FOR_ITER:
            return frame
        frame = frame.f_back
    return None


def _at(frame: FrameType) -> int:
    """Where its instruction begins: Python 3.12 may stand in the cache behind a FOR_ITER."""
    code, at = frame.f_code.co_code, frame.f_lasti
    while at > 0 and code[at] == _CACHE:
        at -= 2
    return at


def _body(frame: FrameType) -> list[dis.Instruction]:
    """Of the loop that stands here."""
    code = list(dis.get_instructions(frame.f_code))
    at = _at(frame)
    head = next(one for one in code if one.offset == at)
    return [one for one in code if head.offset < one.offset < head.argval]


def _names(body: list[dis.Instruction]) -> tuple[list[str], list[str]]:
    """What the loop's body reads only, and what it carries."""
    first: dict[str, str] = {}
    written: set[str] = set()
    for one in body:
        kinds = _VARIABLE.findall(one.opname) if "CLEAR" not in one.opname else []
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        for kind, name in zip(kinds, names, strict=False):
            first.setdefault(name, kind)
            written.update([name] if kind == "STORE" else [])
    read = [name for name, kind in first.items() if kind == "LOAD"]
    return [n for n in read if n not in written], [n for n in read if n in written]


def _carried_attributes(
    frame: FrameType, body: list[dis.Instruction], known: _Known
) -> Iterator[str]:
    """Those that the body reads and writes, as ``data.level += 1``, however seldom it does."""
    written = {one.argval for one in body if one.opname == "STORE_ATTR"}
    found = dict.fromkeys(
        (name, attribute)
        for kind, name, attribute in _attributes(body)
        if kind == "LOAD_ATTR" and attribute in written
    )
    values = _values(frame, [name for name, _ in found])
    for name, attribute in found:
        if name in values and known.would_lose(values[name], attribute):
            yield f"{name}.{attribute}"


def _made_anew(body: list[dis.Instruction]) -> set[str]:
    """What the body sets before it does anything else, as ``self.epoch = step.epoch``."""
    head = takewhile(lambda one: one.opname.startswith(_PLAIN), body)
    first: dict[str, str] = {}
    for kind, name, attribute in _attributes(head):
        first.setdefault(f"{name}.{attribute}", kind)
    return {path for path, kind in first.items() if kind == "STORE_ATTR"}


def _attributes(code: Iterable[dis.Instruction]) -> Iterator[tuple[str, str, str]]:
    """How those of variables are used: the instruction's name, the variable, the attribute."""
    for one, other in pairwise(one for one in code if one.opname not in _NOTHING):
        name = one.argval[-1] if isinstance(one.argval, tuple) else one.argval
        if _VARIABLE.findall(one.opname)[-1:] == ["LOAD"] and other.opname.endswith("_ATTR"):
            yield other.opname, name, other.argval


def _values(frame: FrameType, names: list[str]) -> dict[str, Any]:
    code = frame.f_code
    optimized = bool(code.co_flags & inspect.CO_OPTIMIZED)
    locals_ = {*code.co_varnames, *code.co_cellvars, *code.co_freevars} if optimized else set()
    own: Any = {} if optimized and _hands_out(code) else frame.f_locals
    found = {}
    for name in names:
        if name in own:
            found[name] = own[name]
        elif name in frame.f_globals and name not in locals_:
            found[name] = frame.f_globals[name]
    # Up to Python 3.12 this is a copy that the frame keeps, and with it all batches and outputs.
    if optimized and isinstance(own, dict) and sys.getrefcount(own) <= _ALONE:
        own.clear()
    return found


def _hands_out(code: CodeType) -> bool:
    """Whether the script may hold the frame's own dict, as ``config = locals()`` does.

    Up to Python 3.12 there is one, and to look at it would write all variables into it.
    """
    return sys.version_info < (3, 13) and not {"locals", "vars"}.isdisjoint(_global_names(code))


def _reached(
    name: str, value: Any, seen: set[int], depth: int, known: _Known
) -> Iterator[tuple[str, Any]]:
    """The value itself, or what it holds if it is the script's own object or function."""
    if id(value) in seen or not depth or known.holds(value):
        return
    seen.add(id(value))
    if isinstance(value, MethodType):
        yield from _reached(name, value.__self__, seen, depth, known)
    elif isinstance(value, FunctionType):
        if not is_library(value.__code__.co_filename):
            for inner, part in _used_by(value):
                yield from _reached(inner, part, seen, depth - 1, known)
    elif _is_the_scripts(value):
        for inner, part in list(vars(value).items()):
            yield f"{name}.{inner}", part
    else:
        yield name, value


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")


def _is_the_scripts(value: Any) -> bool:
    """Whether it is an object of a class of the script's own."""
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, _NEVER) or not hasattr(value, "__dict__"):
        return False
    return is_the_scripts(type(value).__module__)


# --- What a value is, to be compared with what it is later -----------------------------------


class _Known:
    """What snapshots hold, down to the lists and dicts in it, and the memory of its tensors."""

    def __init__(self, kept: Iterable[object]) -> None:
        self._ids: set[int] = set()
        self._memory: set[int] = set()
        self._left = 0  # parts to look at
        for value in kept:
            self._add(value, _DEPTH)

    def _add(self, value: Any, depth: int) -> None:
        self._ids.add(id(value))
        if isinstance(value, torch.Tensor):
            self._memory.add(_memory(value))
        elif isinstance(value, torch.nn.Module):
            self._memory.update(map(_memory, (*value.parameters(), *value.buffers())))
        elif depth and isinstance(value, dict | list | tuple | deque):
            parts = value.values() if isinstance(value, dict) else value
            for part in parts:
                self._add(part, depth - 1)

    def holds(self, value: Any) -> bool:
        """Whether it is, or is a part of, what comes back."""
        if isinstance(value, torch.Tensor) and _memory(value) in self._memory:
            return True
        return id(value) in self._ids and not isinstance(value, int | float | str | bool | None)

    def would_lose(self, obj: Any, attribute: str) -> bool:
        """Whether a snapshot does not hold what the script keeps in this attribute."""
        if isinstance(obj, torch.nn.Module):  # what torch's own have is held
            return attribute in vars(obj) and not type(obj).__module__.startswith("torch.")
        return _is_the_scripts(obj) and not self.holds(obj)

    def mark(self, value: Any) -> Any:
        """What tells it from its later self; None: it is not taken for state.

        A tensor's elements are not looked at, which would wait for a GPU.
        """
        self._left = _WORK
        return self._mark(value, _DEPTH)

    def _mark(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self.holds(value) or isinstance(value, bool) or id(value) in OF_ALL or self._left < 0:
            return None
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, torch.Tensor):
            plain = not (value.requires_grad or value.is_inference())
            return (id(value), value._version) if plain else None
        if isinstance(value, np.ndarray):
            return id(value), value.flat[:_MOST].tobytes()
        if isinstance(value, _GENERATORS):
            return _Seeded(value)
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            # Who uses it takes something out of it: no two are equal. That of the steps runs now.
            return None if getattr(value, "gi_running", False) else object()
        if depth and isinstance(value, dict):
            some = islice(value.items(), _MOST)
            return [len(value), *((key(k), self._mark(v, depth - 1)) for k, v in some)]
        if depth and isinstance(value, list | tuple | deque | set):
            return [len(value), *(self._mark(part, depth - 1) for part in islice(value, _MOST))]
        if depth and _is_the_scripts(value):
            return [(name, self._mark(part, depth - 1)) for name, part in vars(value).items()]
        return None


class _Seeded:
    """Unlike another if it has drawn since; not if the loop, or we, have seeded it anew."""

    def __init__(self, generator: Any) -> None:
        own = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        self._seed, self._state = (own, SEEDED[id(generator)]), generator_mark(generator)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seeded) and (
            other._seed != self._seed or other._state == self._state
        )

    __hash__ = None  # type: ignore[assignment]


def _memory(tensor: torch.Tensor) -> int:
    """Where it begins; 0 for what has no memory of the usual kind."""
    usual = tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if usual else 0


def _counts(value: Any, known: _Known) -> bool:
    """Whether a variable that the loop carries may be state: a clock's reading is none."""
    if isinstance(value, int):
        return value < _NANOSECONDS or _counts(value / 1e9, known)
    if isinstance(value, float):
        # No longer ago than this process began: a machine's own clock may begin then, too.
        past = min(_CLOCK_SECONDS, time.monotonic() - _IMPORTED + _BEFORE_SECONDS)
        clocks = (time.time(), time.monotonic(), time.perf_counter())
        return all(abs(value - now) > past for now in clocks)
    return not isinstance(value, (*_NEVER, datetime.datetime)) and not known.holds(value)
