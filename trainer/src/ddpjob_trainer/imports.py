"""What a Python source imports, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def imported(tree: ast.Module | None) -> Iterator[str]:
    """Names of the modules that it imports anywhere, but for those relative to its own."""
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def parsed(path: Path) -> ast.Module | None:
    """None: it is no Python source that could be read."""
    if path.suffix != ".py":
        return None
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
