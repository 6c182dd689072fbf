"""Find the imports of a Python source, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


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
