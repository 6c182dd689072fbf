"""Fork warm spares: processes that have imported torch and the script's modules.

Run by the launcher as a module. A fork server imports once per launcher what every worker needs,
and the modules that --preload names; it forks a spare per worker when asked. A spare gets its
rank's environment, imports what else the script imports at its top level, and waits; called, it
becomes the worker, as `python script.py` would be. No CUDA context, no threads and no seeded
generator before the call.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ddpjob_trainer import environment
from ddpjob_trainer.gpu import devices
from ddpjob_trainer.launcher.processes import children

#: Modules that training imports sooner or later, some as late as in the first step. Found by
#: comparing sys.modules (tests/trainer/test_spares.py); a missing one costs only time.
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
#: What torch.compile imports besides, and finds out once in each process (after the colon): which
#: instructions the CPU has, and hashes of torch and triton. What a version lacks is left out.
COMPILER = (
    "torch._inductor.compile_fx",
    "torch._inductor.cpu_vec_isa:pick_vec_isa",
    "torch._inductor.codecache:torch_key",
    "torch._inductor.codecache:triton_key",
)
_MAX_MESSAGE = 64 * 1024
_MOST_WORDS = 200  # characters about one module
_ADOPTION_SECONDS = 5.0
_HARMLESS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Program:
    """A worker's program. ``module``: ``name`` is a module as in `python -m`, else a script."""

    name: str
    arguments: tuple[str, ...]
    module: bool


#: `import module`, or with names `from module import names`.
Import = tuple[str, tuple[str, ...]]


# --- Requests over a socket -------------------------------------------------------------------


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a line of whole messages. Raises OSError."""
    return socket.socketpair(type=socket.SOCK_SEQPACKET)


def send(to: socket.socket, body: dict[str, Any], fds: list[int]) -> None:
    """Send a message, with descriptors, whole or not at all. Raises OSError."""
    socket.send_fds(to, [json.dumps(body).encode()], fds)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a message and its descriptors, None when the other end is gone."""
    try:
        try:
            data, fds, _, _ = socket.recv_fds(source, _MAX_MESSAGE, 8)
        except ConnectionResetError:  # it ended with our messages unread: its own may be here still
            data, fds, _, _ = socket.recv_fds(source, _MAX_MESSAGE, 8)
    except OSError:
        return None
    return (json.loads(data), list(fds)) if data else None


# --- The fork server --------------------------------------------------------------------------


def _serve(control: socket.socket, launcher: int, threads: int) -> tuple[socket.socket, bool]:
    """Fork a spare for every request, from the first that asks for it on with torch's compiler.

    Returns in the spare: the socket of its call, and whether the call is on its way.
    """
    learned = False
    while (request := receive(control)) is not None:
        body, fds = request
        if body["compiler"] and not learned:
            learned = True
            _learn_compiler(threads)
        pid = os.fork()
        if pid == 0:
            # The spare must be the launcher's child, as orphans are: so its parent ends at once.
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
    os._exit(0)


def _settle(launcher: int, parent: int) -> None:
    """Become a child of the launcher like a fresh worker, once ``parent`` has ended."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while (now := os.getppid()) != launcher:
        if now != parent or time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    children.die_with(launcher)()
    os.setpgid(0, 0)


def _import(module: str, names: tuple[str, ...] = ()) -> None:
    # The script itself reports a failing import, if it needs it.
    with contextlib.suppress(BaseException):
        __import__(module, {}, {}, names)
        for name in names:  # some modules load an attribute on first access
            getattr(sys.modules[module], name, None)


def _preload(control: socket.socket, names: Sequence[str], threads: int) -> str:
    """Import the modules that --preload names; return the warnings."""
    warnings = []
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            warnings.append(f"{name}: {type(error).__name__}: {error}"[:_MOST_WORDS])
        _end_if_unfit(control, threads, f"the import of {name}", ": leave it out of --preload")
    return "; ".join(warnings)


def _learn_compiler(threads: int) -> None:
    """Have later spares know COMPILER, if that leaves nothing behind in a child."""
    pid = os.fork()
    if pid == 0:
        _know_compiler()
        os._exit(1 if _left_behind(threads) else 0)
    if os.waitpid(pid, 0)[1] == 0:
        _know_compiler()
        gc.collect()
        gc.freeze()


def _know_compiler() -> None:
    for name in COMPILER:
        module, _, function = name.partition(":")
        _import(module)
        if function:
            with contextlib.suppress(BaseException):
                getattr(sys.modules[module], function)()


def _end_if_unfit(control: socket.socket, threads: int, who: str, cure: str = "") -> None:
    """End the server if an import left more threads or an open GPU. No fork survives them."""
    if left := _left_behind(threads):
        send(control, {"unfit": f"{who} {left}{cure}"}, [])
        os._exit(1)


def _left_behind(threads: int) -> str:
    """Return what an import has left that no fork survives, "" for nothing."""
    if opened := devices.driver_opened():
        return f"has opened {opened}"
    return "has left threads behind" if _threads_forked() > threads else ""


def _threads_forked() -> int:
    """Count threads that survive a fork's preparation, unlike those of BLAS libraries."""
    if _threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _threads()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


# --- The spare --------------------------------------------------------------------------------


def _wait(line: socket.socket, program: Program, *, called: bool) -> Program:
    """Prepare, wait for the call, become the worker; return the program as it is to run.

    A spare called at once leaves imports to the script, so that their output is seen.
    """
    send(line, {"pid": os.getpid()}, [])
    if not called:
        with contextlib.suppress(BaseException):
            for module, names in imports_by(program):
                _import(module, names)
    opened = "" if called else devices.driver_opened()
    # A context would hold GPU memory in a process that may never be called.
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
    # Confirms the call to the launcher, also when an import has left a child behind that holds this
    # line.
    line.shutdown(socket.SHUT_RDWR)
    line.close()
    sys.orig_argv += body["arguments"]
    return replace(program, arguments=(*program.arguments, *body["arguments"]))


def _become(program: Program) -> None:
    """Set sys.path, argv and __main__ as `python` does."""
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
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    sys.modules["__main__"] = main


def imports_by(program: Program) -> Iterator[Import]:
    """Yield a program's top-level imports; run each before the next. Raises errors of reading."""
    if not program.module:
        yield from imports_of(Path(program.name).read_bytes(), "")
        return
    spec = importlib.util.find_spec(program.name)  # imports the packages around it
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(program.name + ".__main__")
    if spec is not None and spec.origin is not None:
        source = Path(spec.origin).read_bytes()
        yield from imports_of(source, spec.parent or "")


def imports_of(source: bytes, package: str) -> Iterator[Import]:
    """Yield a source's top-level imports, in order.

    It stops at the first statement that is neither an import nor a definition: by another, such as
    `sys.path.insert(0, ...)` or `settings.SIZE = 3`, a later import may differ.
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name, ()
        elif isinstance(statement, ast.ImportFrom):
            base = "." * statement.level + (statement.module or "")
            with contextlib.suppress(ImportError):
                module = importlib.util.resolve_name(base, package or None)
                yield module, tuple(alias.name for alias in statement.names)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        elif not isinstance(statement, _HARMLESS):
            return


def _run(program: Program) -> None:
    sys.argv[:] = [program.name, *program.arguments]
    if program.module:
        # As `python -m` does; run_module() would remove __main__ again at the end.
        getattr(runpy, "_run_module_as_main")(program.name)  # noqa: B009
        return
    path = Path(program.name).absolute()
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, sys.modules["__main__"].__dict__)


def main() -> None:
    """Serve; in a called spare, run the program and end as it ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    given = json.loads(sys.argv[2])
    launcher = os.getppid()
    program = Program(given["name"], tuple(given["arguments"]), given["module"])
    if not sys.flags.safe_path:
        del sys.path[0]  # where -m found this module
    # Its BLAS may start threads, and carries them through a fork itself.
    _import("numpy.random")
    threads = _threads()
    for name in MODULES:
        _import(name)
    _end_if_unfit(control, threads, "an import")
    _become(program)
    warnings = _preload(control, given["preload"], threads)
    gc.collect()
    gc.freeze()  # a collection in a spare would only copy pages
    send(control, {"warm": True, "warnings": warnings}, [])
    line, called = _serve(control, launcher, threads)
    _reseed()
    program = _wait(line, program, called=called)
    environment.arrive(os.environ)  # the package was imported before this had a place
    try:
        _run(program)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _report(error)
        sys.exit(1)
    finally:
        gc.unfreeze()  # else Python's last collection skips them, and triton reports each as a leak


def _reseed() -> None:
    """Seed generators from the system, as a fresh interpreter does, so that forks differ."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _report(error: BaseException) -> None:
    """Print an error as if python itself had started the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


if __name__ == "__main__":
    # Under its own name: the script takes the place of __main__.
    importlib.import_module("ddpjob_trainer.launcher.processes.fork_server").main()
