"""Read a user's script files: their imports, and the places of those that travel with a script.

`ddpjob-trainer init` calls it: the folder of that call is the pods' working directory, too. The
launcher looks here for a script's imports, and other commands refuse notebooks by it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddpjob_trainer.errors import ConfigError


def placed(paths: Sequence[Path]) -> dict[str, Path]:
    """Return all files of these, by their paths in the working directory. Raises ConfigError."""
    return {_inner(one): one for one in _expanded(paths)}


def linked_folders(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the linked folders within these folders, whose files do not travel."""
    for path in paths:
        yield from (one for one in sorted(path.rglob("*")) if one.is_symlink() and one.is_dir())


def check_script(path: Path) -> None:
    """Refuse a script that Python does not start. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(
            f"{path}: a folder: give the script in it, and the folder as one of FILES; with -m give"
            " the module, in the folder that holds the package"
        )
    check_notebook(path)


def check_notebook(path: Path) -> None:
    """Refuse a notebook, with its cure: `init`, `run` and `local`. Raises ConfigError."""
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{path}: a notebook, which Python does not start: jupyter nbconvert --to script {path}"
            f" writes {path.with_suffix('.py')}: give that"
        )


def _inner(path: Path) -> str:
    """Find a file's place below this folder, which is its place in the pods. Raises ConfigError."""
    here = Path.cwd()
    for one in (Path(os.path.abspath(path)), path.resolve()):  # noqa: PTH100 (a link stays one)
        if one.is_relative_to(here):
            return one.relative_to(here).as_posix()
    raise ConfigError(
        f"{path}: is not below {here}, which becomes the script's working directory: change to a"
        " folder that holds all files, and call init there"
    )


def forgotten(files: Mapping[str, Path], root: Path) -> Iterator[Path]:
    """Yield files in ``root`` that travelling files import, but that do not travel."""
    below = (Path(inner) for inner in files if Path(inner).is_relative_to(root))
    tops = {inner.relative_to(root).parts[0] for inner in below}
    trees = map(parsed, files.values())
    names = {name.partition(".")[0] for tree in trees for name in imported(tree)}
    for name in sorted(names):
        for one in (root / name, root / f"{name}.py"):
            if one.name not in tops and (one.is_file() if one.suffix else any(one.glob("*.py"))):
                yield one


def _expanded(paths: Sequence[Path]) -> Iterator[Path]:
    """Expand folders to their files, without hidden ones or those that Python makes."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for one in sorted(path.rglob("*")):
            inner = one.relative_to(path).parts
            if (
                one.is_file()
                and "__pycache__" not in inner
                and not any(part.startswith(".") for part in inner)
            ):
                yield one


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
