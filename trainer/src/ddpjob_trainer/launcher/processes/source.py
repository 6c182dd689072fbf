"""Read from a program's source, without running it, how to start its workers."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

from ddpjob_trainer.imports import imported, parsed
from ddpjob_trainer.launcher.processes.fork_server import Program

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
    names = {_PACKAGE}
    nodes = [] if (tree := _tree(program)) is None else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {one.asname or _PACKAGE for one in node.names if one.name == _PACKAGE}
        elif isinstance(node, ast.ImportFrom) and node.module == _PACKAGE:
            names |= {f"{_PACKAGE}.start" for one in node.names if one.name == "start"}
    return f"{_PACKAGE}.start" in names or any(
        isinstance(node, ast.Attribute)
        and node.attr == "start"
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        for node in nodes
    )


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
