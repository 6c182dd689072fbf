"""Check the arguments of users, one check for each kind, by the declared type.

options.py declares arguments; the commands check theirs by the same functions. Each refusal names
the argument and its valid values. Never imports torch.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, Self

from ddpjob_contract import OUTPUT, resume
from ddpjob_contract.crd import AUTO
from ddpjob_contract.output import flaw
from ddpjob_trainer.errors import ConfigError

#: Whole numbers up to here are exact in a float, as JSON readers and metrics need.
GREATEST = 2**53
#: More processes than any machine can use: a typing error.
MOST_PROCESSES = 1024
#: Options without a value, after which the program's name may follow.
_FLAGS = ("-m", "--module", "--anew", "--standalone", "--no-python")


def whole(name: str, value: Any, *, least: int = 0, most: int = GREATEST) -> int:
    """Return an integer within bounds; plain, for a snapshot's JSON, even from numpy."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise _odd(name, value, "must be an integer")
    if number < least:
        raise _odd(name, value, f"must be at least {least}")
    if number > most:
        raise _odd(name, value, f"must be at most {most}")
    return number


def _whole_or_auto(name: str, value: Any, *, least: int) -> int | str:
    if not isinstance(value, str):
        return whole(name, value, least=least)
    if value != AUTO:
        raise _odd(name, value, f"must be an integer or {AUTO!r}")
    return value


def real(name: str, value: Any, *, most: float = math.inf) -> float:
    """Return a number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _odd(name, value, "must be a number")
    number: Any = value
    if not number > 0:
        raise _odd(name, value, "must be more than 0")
    if number > most:
        raise _odd(name, value, f"must be at most {most:g}")
    return float(number)


def flag(name: str, value: Any) -> bool:
    """Return a bool; refuse a string, which would always be true."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # numpy's
        raise _odd(name, value, "must be True or False")
    return bool(value)


def as_path(name: str, value: Any) -> Path:
    """Return a path; refuse an empty one, which would mean the working directory."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = b""
    if not isinstance(text, str) or not text or "\0" in text:
        raise _odd(name, value, "must be a path")
    return Path(text)


def _names(name: str, value: Any) -> frozenset[str]:
    if not isinstance(value, str | list | tuple | set | frozenset):
        raise _odd(name, value, "must be names with commas between them, or a list")
    listed = value.split(",") if isinstance(value, str) else value
    return frozenset(str(one).strip() for one in listed if str(one).strip())


def _is_scaler(value: Any) -> bool:
    return all(callable(getattr(value, part, None)) for part in ("scale", "unscale_", "update"))


def _of(what: str, fits: Callable[[Any], bool]) -> Callable[[str, Any], Any]:
    """Make the check of a kind that is taken as it is."""

    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise _odd(name, value, f"must be {what}")
        return value

    return check


function = _of("a function", callable)
_KINDS: Mapping[str, Callable[..., Any]] = {
    "int": whole,
    "int | str": _whole_or_auto,
    "float": real,
    "bool": flag,
    "bool | str": _of(
        "True, False or the name of a backend",
        lambda value: isinstance(value, bool) or (isinstance(value, str) and bool(value)),
    ),
    # A script may change its directory.
    "str | os.PathLike[str]": lambda name, value: as_path(name, value).absolute(),
    "str": _of("a string", lambda value: isinstance(value, str)),
    "str | Sequence[str]": _names,
    "fetch.Collate": function,
    "Log": function,
    "torch.amp.GradScaler": _of("a torch.amp.GradScaler", _is_scaler),
    "Any": _of("anything", lambda value: True),  # checked where it is used
}


def checked(one: Field[Any], value: Any, of: str = "") -> Any:
    """Return the checked value of an argument, or of an object's field. Raises ConfigError."""
    kind, name = str(one.type), of + one.name
    if value is None and kind.endswith(" | None"):
        return None
    bounds = {key: bound for key, bound in one.metadata.items() if key in ("least", "most")}
    found = _KINDS[kind.removesuffix(" | None")](name, value, **bounds)
    if allowed := one.metadata.get("choices"):
        for each in sorted(found) if isinstance(found, frozenset) else [found]:
            if each not in allowed:
                none = ("None",) if kind.endswith(" | None") else ()
                cure = one.metadata.get("cure", "")
                names = ", ".join((*none, *map(repr, allowed)))
                raise _odd(name, each, f"must be one of {names}{cure}")
    return found


@dataclass(frozen=True, slots=True)
class Arguments:
    """Declared arguments of one call."""

    @classmethod
    def among(cls, given: Mapping[str, Any], of: str = "") -> Self:
        """Select these from all arguments and check each. Raises ConfigError."""
        return cls(**{one.name: checked(one, given[one.name], of) for one in fields(cls)})


def check_notebook(path: Path) -> None:
    """Refuse a notebook, with its cure. Raises ConfigError."""
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{path}: a notebook, which Python does not start: jupyter nbconvert --to script {path}"
            f" writes {path.with_suffix('.py')}: give that"
        )


def joined(words: Sequence[str]) -> list[str]:
    """Make `--resume-args --resume` one word: argparse takes the second for an option of ours."""
    for at, word in enumerate(words[:-1]):
        if word == "--resume-args":
            return [*words[:at], f"{word}={words[at + 1]}", *words[at + 2 :]]
        before = words[at - 1] if at else ""
        option = before.startswith("-") and "=" not in before and before not in _FLAGS
        if word == "--" or (at and word[:1] != "-" and not option):
            break  # what follows is the program's
    return [*words]


def resume_words(given: str) -> tuple[str, ...]:
    """Split --resume-args as a shell does. Raises ConfigError."""
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise ConfigError(f"--resume-args {given!r}: {error}") from None


def check_resume(words: Sequence[str], when: str) -> None:
    """Refuse arguments that name a checkpoint which nothing finds. Raises ConfigError."""
    if why := resume.flaw(words, when):
        raise ConfigError(why)


def output_of(given: Mapping[str, Any], read: Sequence[str]) -> Mapping[str, Any]:
    """Return spec.output with what --read says in place of it. Raises ConfigError."""
    found: dict[str, Any] = {**given}
    for one in read:
        what, equals, pattern = one.partition("=")
        if one in ("auto", "never"):
            found["forms"] = one.capitalize()
        elif not equals:
            raise ConfigError(f"--read {one}: must be WHAT=REGEX, auto or never")
        elif what in ("step", "totalSteps", "loss"):
            found[what] = pattern
        else:
            found["metrics"] = {**found.get("metrics", {}), what: pattern}
    if why := flaw(found):
        raise ConfigError(f"{'--read' if read else OUTPUT}: {why}")
    return found


def _odd(name: str, value: Any, what: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(f"{name}={shown if len(shown) <= 80 else shown[:77] + '...'} {what}")
