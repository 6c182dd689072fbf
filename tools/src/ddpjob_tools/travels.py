"""Choose the files that travel with a script, and their places in its working directory.

`ddpjob init` calls it: the folder of that call is the pods' working directory, too.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from ddpjob_trainer.arguments import check_notebook
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.launcher.processes.source import imported, parsed


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
    names = (name for path in files.values() for name in imported(parsed(path)))
    return {name.partition(".")[0] for name in names} - own


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
