"""Tell whether a script's exception, raised before its first step, would come again.

worker_group.py asks at the end of a process; hub/rounds.py ends the attempt where all processes
have raised it, twice. What storage, a network or another program may cure is left out.
"""

from __future__ import annotations

import builtins
import os
import re
import sysconfig
from pathlib import Path

from ddpjob_trainer.launcher.processes.fork_server import Program

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
    places = (Path(sysconfig.get_path(name)) for name in _INSTALLED)
    return any(Path(file).is_relative_to(place) for place in places)


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _comes_with_code(path: Path, folder: Path) -> bool:
    """Return whether a missing file belongs beside the script, and not on a volume or elsewhere."""
    path = path.absolute()
    there = next(one for one in path.parents if one.exists())
    same_disk = os.stat(there).st_dev == os.stat(folder).st_dev  # noqa: PTH116
    return same_disk and (_is_below(path, folder) or _is_below(path, Path.cwd()))
