"""Read from a program's source, without running it, how to start its workers and what would recur.

worker_group.py asks at the end of a process whether its exception, raised before its first step,
would come again; hub/rounds.py ends the attempt where all processes have raised it, twice. What
storage, a network or another program may cure is left out.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ddpjob_trainer.launcher.processes.fork_server import Program

# --- Imports --------------------------------------------------------------------------------------


def imported(tree: ast.Module | None) -> Iterator[str]:
    """Yield the names of imported modules, without relative ones."""
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def parsed(path: Path) -> ast.Module | None:
    """Parse a file; None: no readable Python source."""
    if path.suffix != ".py":
        return None
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


# --- How the program uses our library -------------------------------------------------------------

_PACKAGE = "ddpjob_trainer"


def uses_our_library(program: Program) -> bool:
    """Return whether the program imports ddpjob_trainer, as far as its source shows.

    Other programs may set environment before they import torch, which a spare has done already, and
    serve the store themselves. So may a program that uses our adapters only.
    """
    if program.module and program.name.split(".")[0] == _PACKAGE:
        return True
    names = [name.split(".") for name in imported(_tree(program))]
    return any(parts[0] == _PACKAGE and parts[1:2] != ["adapters"] for parts in names)


def calls_start(program: Program) -> bool:
    """Return whether the source calls our start(): others import the library to read snapshots."""
    names, tree = {_PACKAGE}, _tree(program)
    nodes = [*ast.walk(tree)] if tree is not None else []
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {one.asname or _PACKAGE for one in node.names if one.name == _PACKAGE}
        elif isinstance(node, ast.ImportFrom) and node.module == _PACKAGE:
            names |= {f"{_PACKAGE}.start" for one in node.names if one.name == "start"}
    read = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "start"]
    of = {node.value.id for node in read if isinstance(node.value, ast.Name)}
    return f"{_PACKAGE}.start" in names or not of.isdisjoint(names)


def _tree(program: Program) -> ast.Module | None:
    path = _module_path(program.name) if program.module else Path(program.name)
    return parsed(path) if path is not None else None


def _module_path(name: str) -> Path | None:
    """Find a module's file without importing its packages."""
    parts = Path(*name.split("."))
    for entry in (os.getcwd(), *sys.path):  # noqa: PTH109
        base = Path(entry) / parts
        for path in (base.with_suffix(".py"), base / "__main__.py"):
            if path.is_file():
                return path
    return None


# --- Exceptions that would come again -------------------------------------------------------------

_NAMED = re.compile(r"^FileNotFoundError: .*: '([^']+)'$")
_INSTALLED = ("stdlib", "purelib", "platlib")


def would_repeat(program: Program, exception: str, raised_in: str) -> bool:
    """Return whether a file of the program raised it, and no storage or network did.

    ``raised_in``: the file of the innermost frame, "" for an exception that another one caused.
    """
    folder = Path.cwd() if program.module else Path(program.name).absolute().parent
    own = raised_in and _is_below(Path(raised_in), folder) and not _is_installed(raised_in)
    name = exception.partition(":")[0]
    if not own or "." in name:  # a library's exception may be that of a network
        return False
    kind = getattr(builtins, name, Exception)  # or a class of the script
    if issubclass(kind, FileNotFoundError):
        found = _NAMED.match(exception)
        return found is not None and _comes_with_code(Path(found[1]), folder)
    # torch raises RuntimeError in the script's frame, and both are words about anything.
    return not issubclass(kind, OSError | MemoryError | RuntimeError | AssertionError)


def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(sysconfig.get_path(name)) for name in _INSTALLED)


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _comes_with_code(path: Path, folder: Path) -> bool:
    """Return whether a missing file belongs beside the script, and not on a volume or elsewhere."""
    path = path.absolute()
    there = next(one for one in path.parents if one.exists())
    same_disk = os.stat(there).st_dev == os.stat(folder).st_dev  # noqa: PTH116
    return same_disk and (_is_below(path, folder) or _is_below(path, Path.cwd()))
