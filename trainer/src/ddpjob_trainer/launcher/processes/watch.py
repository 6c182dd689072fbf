"""What an import does beside importing, seen while it runs or by what it has changed.

A module that only defines things is the same in every worker and can be shared by a fork. One that
asks who it is (a rank's environment, its pid, random numbers), changes what belongs to the whole
process, prints, or leaves behind what a fork does not bring along or lets all use at once (threads,
descriptors, children, shared memory) is not.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ddpjob_trainer.launcher.processes import children

#: A file by which one sees that it has changed: time, size, inode.
Stamp = tuple[int, int, int]
_LOOK_SECONDS = 0.25
_CLOCK_TICK = 10_000_000  # ns; the time of a file may be older than the clock by as much
#: Who may do what: it is known what for, and that a fork does it no harm.
_KNOWN = {
    ("filelock._api", "calls os.getpid()"),  # to notice a fork
    ("fsspec.spec", "calls os.getpid()"),  # likewise
    ("transformers.utils.hub", "calls os.urandom()"),  # a name for its downloads
}
_libc = ctypes.CDLL(None, use_errno=True)
_Refuse = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Import:
    """`import module`, or with names `from module import names`."""

    module: str
    names: tuple[str, ...] = ()

    def run(self) -> None:
        """Raises what the import raises, but of what is not in the module says nothing."""
        __import__(self.module, {}, {}, self.names)
        for name in self.names:  # some modules load what they have when it is asked for
            getattr(sys.modules[self.module], name, None)

    @property
    def loaded(self) -> bool:
        """Whether there is nothing left to do."""
        module = sys.modules.get(self.module)
        return module is not None and set(self.names) <= getattr(module, "__dict__", {}).keys()


def watched_import(
    what: Import, differing: Collection[str], refuse: Callable[[str], None]
) -> dict[str, Stamp | None]:
    """Import it; return the files that it has read, or looked for, and may not have changed later.

    Says to ``refuse`` why it cannot be shared, as soon as it is seen, more than once if that
    returns. ``differing``: variables of which each worker, or each round, has its own value.
    Raises what the import raises.
    """
    begun = time.time_ns()
    known = set(sys.modules)
    read: set[str] = set()
    with _output() as output:
        vitals = _Vitals(output)

        def look() -> None:
            if why := vitals.changed():
                refuse(why)

        try:
            with _environment(differing, refuse), _functions(refuse, read), _now_and_then(look):
                what.run()
        finally:
            new = [module for key, module in list(sys.modules.items()) if key not in known]
            _forget_stand_ins(new)
        look()
    for module in new:
        if isinstance(path := getattr(module, "__file__", None), str):
            read.add(path)
    stamps = {path: stamp(path) for path in read}
    if any(found and found[0] >= begun - _CLOCK_TICK for found in stamps.values()):
        refuse("was edited meanwhile")
    return stamps


def stamp(path: str) -> Stamp | None:
    """None: there is no such file."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)  # noqa: PTH116  thousands of them
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None


# --- Seen at once -----------------------------------------------------------------------------


@contextlib.contextmanager
def _environment(differing: Collection[str], refuse: _Refuse) -> Iterator[None]:
    """The names in question may not be read, nor all variables, and none be changed."""
    plain: Any = type(os.environ)

    class Watched(plain):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            if os.fsdecode(key) in differing:
                refuse(f"reads {os.fsdecode(key)}")
            return plain.__getitem__(self, key)

        def __iter__(self) -> Any:
            refuse("reads the whole environment")
            return plain.__iter__(self)

        def __repr__(self) -> str:
            refuse("reads the whole environment")
            return str(plain.__repr__(self))

        def __setitem__(self, key: Any, value: Any) -> None:
            refuse("changes the environment")
            plain.__setitem__(self, key, value)

        def __delitem__(self, key: Any) -> None:
            refuse("changes the environment")
            plain.__delitem__(self, key)

    both: list[Any] = [os.environ, os.environb]
    for one in both:
        one.__class__ = Watched
    try:
        yield
    finally:
        for one in both:
            one.__class__ = plain


class _StandIn:
    """Called in the place of a function."""

    def __init__(self, function: Any, before: Callable[..., None]) -> None:
        self.function = function
        self.before: Callable[..., None] | None = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            self.before(*args, **kwargs)
        return self.function(*args, **kwargs)


@contextlib.contextmanager
def _functions(refuse: _Refuse, read: set[str]) -> Iterator[None]:
    """Those by which a process finds out who it is may not be called; ``read``: files opened."""

    def differs(name: str) -> Callable[..., None]:
        def called(*_: Any, **__: Any) -> None:
            why = f"calls {name}()"
            if (_caller(), why) not in _KNOWN:
                refuse(why)

        return called

    def opens(file: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        if isinstance(file, str | bytes | os.PathLike) and not set(mode) & set("wax+"):
            path = os.path.realpath(os.fsdecode(file))
            if not path.startswith(("/proc/", "/sys/", "/dev/")):
                read.add(path)

    seed = random.Random.seed

    def seeds(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            refuse("seeds a generator from the system")
        seed(self, a, version)

    names = ("getpid", "getppid", "urandom", "getrandom", "putenv", "unsetenv")
    with _replaced(
        *((os, name, _StandIn(getattr(os, name), differs(f"os.{name}"))) for name in names),
        (random, "_urandom", _StandIn(os.urandom, differs("os.urandom"))),
        (random.Random, "seed", seeds),
        *((module, "open", _StandIn(open, opens)) for module in (builtins, io)),
    ):
        yield


@contextlib.contextmanager
def _replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """``places``: an object, an attribute of it, and what that shall be."""
    old = [getattr(holder, name) for holder, name, _ in places]
    try:
        for holder, name, stand_in in places:
            setattr(holder, name, stand_in)
        yield
    finally:
        for (holder, name, stand_in), function in zip(places, old, strict=True):
            setattr(holder, name, function)
            if isinstance(stand_in, _StandIn):
                stand_in.before = None


def _caller() -> str:
    """The module that is at work, but for those of the standard library that do it for it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and name.partition(".")[0] not in sys.stdlib_module_names:
            return name
        frame = frame.f_back
    return ""


def _forget_stand_ins(modules: Collection[Any]) -> None:
    """`from os import getpid` keeps what it finds."""
    for module in modules:
        names: dict[str, Any] = getattr(module, "__dict__", {})
        for key, value in list(names.items()):
            if type(value) is _StandIn:
                names[key] = value.function


class _now_and_then:  # noqa: N801  a context manager in lower case, as those beside it
    """Calls back between nested imports: what is refused in the end has cost its time."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._due = time.monotonic() + _LOOK_SECONDS

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if time.monotonic() > self._due:
            self._look()
            self._due = time.monotonic() + _LOOK_SECONDS

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


# --- Seen by what has changed -----------------------------------------------------------------


@contextlib.contextmanager
def _output() -> Iterator[int]:
    """Has whatever is printed, by C too, go to a file in memory."""
    file = os.memfd_create("output")
    kept = [(target, os.dup(target)) for target in (1, 2)]
    try:
        for target, _ in kept:
            os.dup2(file, target)
        yield file
    finally:
        for target, old in kept:
            os.dup2(old, target)
            os.close(old)
        os.close(file)


class _Vitals:
    """This process, as it is now and as it was before."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._before = _signs()
        self._reaped = _reaped()
        self._tasks = _tasks_after_a_fork()
        self._reaped = _reaped()

    def changed(self) -> str | None:
        """Say what has changed, if anything."""
        _libc.fflush(None)
        if os.fstat(self._output).st_size:
            return "prints"
        now = _signs()
        for what, value in self._before.items():
            if now[what] != value:
                return what
        if _reaped() != self._reaped:
            return "starts processes"
        tasks = _tasks_after_a_fork()
        self._reaped = _reaped()
        return "starts threads" if tasks > self._tasks else None


def _signs() -> dict[str, object]:
    umask = Path("/proc/self/status").read_text().partition("\nUmask:")[2].split("\n")[0]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "leaves descriptors open": _descriptors(),
        "starts processes": sorted(children.children()),
        "changes the working directory or umask": (os.getcwd(), umask),  # noqa: PTH109
        "handles or blocks signals": (
            [signal.getsignal(one) for one in sorted(signal.valid_signals())],
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
            [signal.getitimer(one)[0] > 0 for one in (0, 1, 2)],
        ),
        "draws random numbers": _generators(),
        "initialises CUDA": _cuda(),
        "maps shared memory": [line for line in mapped if line.split(None, 2)[1].endswith("s")],
    }


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # that of this listing
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def _generators() -> list[object]:
    """Those of modules that were there before the import; a fresh one is drawn from the system."""
    states: list[object] = [random.getstate()]
    if get_state := getattr(sys.modules.get("numpy.random"), "get_state", None):
        name, keys, *rest = get_state()
        states.append((name, keys.tobytes(), *rest))
    if generator := getattr(sys.modules.get("torch"), "default_generator", None):
        states.append(generator.get_state().tolist())
    return states


def _cuda() -> bool:
    initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    return bool(initialized and initialized())


def _reaped() -> int:
    """Grows with each child that was waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _tasks_after_a_fork() -> int:
    """How many threads there are that no owner ends before a fork, as BLAS libraries do theirs."""
    if _tasks() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _tasks()


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208
