"""Warm spares: processes that have imported torch and the script's modules, and wait to be called.

A fork server imports once per launcher what every worker needs, and the modules that --preload
names; it forks a spare per worker when asked. A spare gets its rank's environment, imports what
else the script imports at its top level, and waits; called, it becomes the worker, as
`python script.py` would be. No CUDA context, no threads and no seeded generator before the call.
Run by the launcher as a module.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ddpjob_trainer import gpu_devices

#: What training imports sooner or later, some of it as late as in the first step. Found by
#: comparing sys.modules (tests/trainer/test_spares.py); one that is missing costs only time.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.data",
    "safetensors.torch",
    "prometheus_client.multiprocess",
    "ddpjob_trainer.training.start",
)
MAX_REQUEST = 1024 * 1024
_MOST_TOLD = 200  # characters about one module
_PR_SET_PDEATHSIG = 1
_ADOPTION_SECONDS = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker runs. ``module``: ``name`` is a module as in `python -m`, else a script."""

    name: str
    arguments: tuple[str, ...]
    module: bool


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


@dataclass(frozen=True, slots=True)
class _Script:
    """A script as the spare has read it."""

    source: bytes
    code: types.CodeType


# --- Requests over a socket -------------------------------------------------------------------


def send(to: socket.socket, body: dict[str, Any], fds: list[int]) -> None:
    """One line of JSON, with descriptors. Raises OSError; BlockingIOError: nothing was sent."""
    data = json.dumps(body).encode() + b"\n"
    if rest := data[socket.send_fds(to, [data], fds) :]:
        # Not with nothing left: even that fails when the other end has read and closed by now.
        try:
            to.sendall(rest)
        except BlockingIOError as error:
            raise ConnectionError("a request was cut short") from error


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a line of JSON and its descriptors; None when the other end is closed or lost."""
    try:
        data, fds, _, _ = socket.recv_fds(source, MAX_REQUEST, 8)
        while data and not data.endswith(b"\n"):
            more = source.recv(MAX_REQUEST)
            if not more:
                return None
            data += more
    except OSError:
        return None
    return (json.loads(data), list(fds)) if data else None


# --- The fork server --------------------------------------------------------------------------


def _serve(control: socket.socket, launcher: int) -> tuple[socket.socket, bool]:
    """Fork a spare for every request.

    Returns in the spare: the socket it is called by, and whether the call is on its way.
    """
    while True:
        request = receive(control)
        if request is None:
            os._exit(0)
        body, fds = request
        pid = os.fork()
        if pid == 0:
            # The spare must be the launcher's child: orphans are, so its parent ends at once.
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            control.close()
            line = socket.socket(fileno=fds[0])
            _settle(launcher, parent)
            os.environ.update(body["env"])
            return line, bool(body["called"])
        for fd in fds:
            os.close(fd)
        os.waitpid(pid, 0)


def _settle(launcher: int, parent: int) -> None:
    """Become a process like one that the launcher has started itself, when ``parent`` has ended."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while (now := os.getppid()) != launcher:
        if now != parent or time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the call above
        os._exit(1)
    os.setpgid(0, 0)


def _import(what: Import) -> None:
    # What cannot be imported now will tell why in the script, or is not needed.
    with contextlib.suppress(BaseException):
        what.run()


def _preload(control: socket.socket, given: dict[str, Any]) -> str:
    """Import the modules that --preload names; return what is to be told of them.

    One that leaves behind what no fork survives is left out, by an interpreter of its own.
    """
    environment = dict(os.environ)
    before = _threads()
    for name in given["preload"]:
        try:
            importlib.import_module(name)
        except BaseException as error:
            given["told"].append(f"{name}: {type(error).__name__}: {error}"[:_MOST_TOLD])
        left = gpu_devices.driver_opened() or ("threads" if _threads_forked() > before else "")
        if left:
            given["told"].append(f"{name}: its import leaves {left} behind"[:_MOST_TOLD])
            given["preload"].remove(name)
            command = ("-u", "-m", __name__, str(control.fileno()), json.dumps(given))
            os.execve(sys.executable, (sys.executable, *command), environment)
    return "; ".join(given["told"])


def _threads_forked() -> int:
    """How many threads there are that no owner ends before a fork, as BLAS libraries do theirs."""
    if _threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _threads()


# --- The spare --------------------------------------------------------------------------------


def _wait(line: socket.socket, program: Program, *, called: bool) -> _Script | None:
    """Get ready, wait for the call, become the worker.

    Who is called at once imports in the script: what that prints is seen.
    """
    send(line, {"pid": os.getpid()}, [])
    script = None
    if not called:
        with contextlib.suppress(BaseException):
            script = _prepare(program)
    opened = "" if called else gpu_devices.driver_opened()
    # A context would hold a GPU's memory in a process that may never be called.
    send(line, {"unfit": f"an import has opened {opened}"} if opened else {"ready": True}, [])
    request = receive(line)
    if request is None:
        os._exit(0)
    body, fds = request
    os.environ.update(body["env"])
    for target, fd in zip((1, 2), fds, strict=False):
        os.dup2(fd, target)
        os.close(fd)
    for name, fd in zip(body["fds"], fds[2:], strict=False):
        os.environ[name] = str(fd)
    # Tells the launcher that the call was heard, also when an import has left a child behind
    # that holds this line.
    line.shutdown(socket.SHUT_RDWR)
    line.close()
    return script


def _become(program: Program) -> None:
    """Look to modules as `python` does, while they are imported and later."""
    if not sys.flags.safe_path:
        # The script's directory first, or the current one for a module.
        first = os.getcwd() if program.module else os.path.dirname(os.path.realpath(program.name))  # noqa: PTH109, PTH120
        sys.path.insert(0, first)
    sys.argv[:] = [program.name, *program.arguments]
    how = ["-m"] if program.module else []
    sys.orig_argv[:] = [sys.executable, "-u", *how, *sys.argv]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    if not program.module:
        path = str(Path(program.name).absolute())
        main.__dict__.update(
            __file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None
        )
    sys.modules["__main__"] = main


def _prepare(program: Program) -> _Script | None:
    """Import what the program imports at its top level; return a script compiled."""
    source = b"" if program.module else Path(program.name).read_bytes()
    for one in imports_by(program):
        _import(one)
    if program.module:
        return None
    return _compiled(program, source)


def _compiled(program: Program, source: bytes) -> _Script:
    """Compile a script under its absolute path, as `python` does."""
    path = str(Path(program.name).absolute())
    return _Script(source, compile(source, path, "exec", dont_inherit=True))


def imports_by(program: Program) -> Iterator[Import]:
    """Yield what a program imports at its top level; each is to be done before the next.

    Raises what reading it raises.
    """
    if not program.module:
        yield from imports_of(Path(program.name).read_bytes(), "")
        return
    parts = program.name.split(".")
    yield from (Import(".".join(parts[:end])) for end in range(1, len(parts)))
    spec = importlib.util.find_spec(program.name)
    if spec is not None and spec.submodule_search_locations is not None:
        yield Import(program.name)
        spec = importlib.util.find_spec(program.name + ".__main__")
    if spec is not None and spec.origin is not None:
        source = Path(spec.origin).read_bytes()
        yield from imports_of(source, spec.parent or "")


def imports_of(source: bytes, package: str) -> Iterator[Import]:
    """Yield what a source imports at its top level, in its order.

    Up to the first statement by which an import that comes after it may be another.
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield Import(alias.name)
        elif isinstance(statement, ast.ImportFrom):
            base = "." * statement.level + (statement.module or "")
            with contextlib.suppress(ImportError):
                module = importlib.util.resolve_name(base, package or None)
                yield Import(module, tuple(alias.name for alias in statement.names))
        elif _has_effect(statement):
            return


def _has_effect(statement: ast.stmt) -> bool:
    """Whether it calls something but for a value, or changes what is no variable of its own.

    `sys.path.insert(0, ...)`, `torch.set_default_dtype(...)`, `settings.SIZE = 3`.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return True
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return True
    return False


def _run(program: Program, script: _Script | None) -> None:
    """Run the program as __main__."""
    sys.argv[:] = [program.name, *program.arguments]
    if program.module:
        # What `python -m` itself calls; run_module() would take __main__ away again at the end.
        getattr(runpy, "_run_module_as_main")(program.name)  # noqa: B009
        return
    source = Path(program.name).read_bytes()
    if script is None or script.source != source:  # it has been edited since
        script = _compiled(program, source)
    exec(script.code, sys.modules["__main__"].__dict__)


def main() -> None:
    """Serve; in a spare that was called, run the program and end as it ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    given = json.loads(sys.argv[2])
    launcher = os.getppid()
    program = Program(given["name"], tuple(given["arguments"]), given["module"])
    if not sys.flags.safe_path:
        del sys.path[0]  # where -m found this module
    # Its BLAS may start threads, and brings them through a fork itself.
    _import(Import("numpy.random"))
    before = _threads()
    for name in MODULES:
        _import(Import(name))
    if (threads := _threads() - before) > 0:  # a fork takes none of them along
        send(control, {"unfit": f"imports have started {threads} threads"}, [])
        os._exit(1)
    if opened := gpu_devices.driver_opened():
        send(control, {"unfit": f"an import has opened {opened}"}, [])
        os._exit(1)
    _become(program)
    told = _preload(control, given)
    _freeze()
    send(control, {"warm": True, "told": told}, [])
    line, called = _serve(control, launcher)
    _reseed()
    script = _wait(line, program, called=called)
    try:
        _run(program, script)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _report(error)
        sys.exit(1)
    finally:
        gc.unfreeze()  # else what Python's end collects stays: triton would tell of each as a leak


def _freeze() -> None:
    """The collector of a spare would only copy pages."""
    gc.collect()
    gc.freeze()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _reseed() -> None:
    """A fresh interpreter's generators draw from the system; forks of one must not draw alike."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _report(error: BaseException) -> None:
    """Have the hook print it as if the script had been started by python itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


if __name__ == "__main__":
    # As a module of its own: the script takes the place of __main__.
    importlib.import_module("ddpjob_trainer.launcher.processes.fork_server").main()
