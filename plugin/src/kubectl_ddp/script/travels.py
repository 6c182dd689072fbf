"""Choose the files that travel with a script, and their places in its working directory.

manifest.py calls it: the folder of that call is the pods' working directory, too.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from kubectl_ddp.kubectl import Failure


def placed(paths: Sequence[Path]) -> dict[str, Path]:
    """Return all files of these, by their paths in the working directory. Raises Failure."""
    return {_inner(one): one for one in _expanded(paths)}


def required(pip: Mapping[str, Path], files: Mapping[str, Path]) -> dict[str, Path]:
    """Return requirements, and those of the files that they name: -r base.txt, -c, ./wheel.whl."""
    found, left = dict(pip), list(pip)
    while left:
        inner = left.pop()
        folders = ("", os.path.dirname(inner))  # noqa: PTH120 (of the pods)
        for word in re.split(r"[\s=]+", found[inner].read_text(errors="replace")):
            for one in {os.path.normpath(os.path.join(folder, word)) for folder in folders}:  # noqa: PTH118
                if one in files and one not in found:
                    found[one] = files[one]
                    left += [one] * one.endswith(".txt")
    return found


def check_script(path: Path) -> None:
    """Refuse a script that Python does not start. Raises Failure."""
    if path.is_dir():
        raise Failure(
            f"{path}: a folder: give the script in it, and the folder as one of FILES; with -m give"
            " the module, in the folder that holds the package"
        )
    if path.suffix == ".ipynb":
        raise Failure(
            f"{path}: a notebook, which Python does not start: jupyter nbconvert --to script {path}"
            f" writes {path.with_suffix('.py')}: give that"
        )


def _inner(path: Path) -> str:
    """Find a file's place below this folder, which is its place in the pods. Raises Failure."""
    here = Path.cwd()
    for one in (Path(os.path.abspath(path)), path.resolve()):  # noqa: PTH100 (a link stays one)
        if one.is_relative_to(here):
            return one.relative_to(here).as_posix()
    raise Failure(
        f"{path}: is not below {here}, which becomes the script's working directory: change to a"
        " folder that holds all files, and call init there"
    )


def forgotten(files: Mapping[str, Path], root: Path) -> Iterator[Path]:
    """Yield files in ``root`` that travelling files import, but that do not travel."""
    below = (Path(inner) for inner in files if Path(inner).is_relative_to(root))
    tops = {inner.relative_to(root).parts[0] for inner in below}
    for name in sorted({name for path in files.values() for name in _imported(path)}):
        for one in (root / name, root / f"{name}.py"):
            if one.name not in tops and (one.is_file() if one.suffix else any(one.glob("*.py"))):
                yield one


def lacking(files: Mapping[str, Path], has: Container[str]) -> Iterator[str]:
    """Yield the packages that travelling files import, and neither they nor the image have."""
    here = {path.stem for one in files.values() for path in one.parent.glob("*")}
    yield from sorted(name for name in _packages(files) - here if name not in has)


def trains_alone(files: Mapping[str, Path], has: Container[str]) -> bool:
    """Return whether files with torch form no process group, as far as their words tell.

    A package that is not in ``has`` may form one, as Lightning does.
    """
    names = _packages(files)
    sources = [path.read_bytes() for path in files.values() if path.suffix == ".py"]
    said = any(b"distributed" in source for source in sources)
    return "torch" in names and not said and all(name in has for name in names)


def _packages(files: Mapping[str, Path]) -> set[str]:
    """Return what the files import, except from one another."""
    inner = [Path(one) for one in files]
    own = {part for one in inner for part in (*one.parts[:-1], one.stem)}
    return {name for path in files.values() for name in _imported(path)} - own


def _imported(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports; none where it is no readable Python source."""
    try:
        tree = ast.parse(path.read_bytes() if path.suffix == ".py" else b"")
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def named(arguments: Sequence[str], files: Mapping[str, Path]) -> Iterator[str]:
    """Yield what is here and named by the script's arguments, but does not travel."""
    inner = [Path(one) for one in files]
    for value in (word.partition("=")[2] or word for word in arguments):
        path = Path(os.path.normpath(value))
        travels = path.is_absolute() or any(one.is_relative_to(path) for one in inner)
        if value.strip("./") and path.exists() and not travels:
            yield value


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
