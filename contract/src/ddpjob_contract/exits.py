"""Judge an exit code: its class, its names, and what follows without a user's rule.

The operator judges pods and rounds so, with what else it knows of them; `ddpjob local` launchers.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from typing import Final, Literal

from ddpjob_contract import LEFT_EARLY, PERMANENT_EXIT_CODES, UNRESOLVED, ExitCode

Action = Literal["Restart", "RestartFree", "Fail"]

#: Classes from the strongest cause to the weakest.
SEVERITY: Final = (
    "Permanent",
    "Hardware",  # before what it may have brought about: other bits, a hang, peers that fail
    "Diverged",
    "OOM",
    "Hang",
    "Killed",
    "User",
    "Infrastructure",
    "Disruption",
    "Collateral",
)
#: Not the user's doing: restarted without touching maxRestarts.
FREE: Final = frozenset({"Hardware", "Infrastructure", "Disruption"})
#: Without an exit code all the same: containers that ran.
_RAN: Final = frozenset({"NodeLost", "NodeSilent", "ContainerRestarted", "Unknown"})
#: Of processes that do not find rank 0 by its name.
UNRESOLVED_NAMES: Final = "NamesNotResolved"
#: One exception so often in a row at one step would come again: the hub ends the attempt, by the
#: whole text that it has; the operator fails the job, by the part that every record has.
SAME_EXCEPTION: Final = 3
#: What differs by process and time: an address, a port, a duration, a pid.
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
#: When only collateral losses were seen, the cause gets this long to show itself. The time of
#: a death is given in whole seconds, and one kubelet may tell of it seconds after another.
CAUSE_SECONDS: Final = 5
#: What the others get to end once a member is dead: nothing can be saved any more.
DEAD_GANG_SECONDS: Final = 2

#: Codes with a class of their own, the permanent ones apart.
CLASSES: Final[Mapping[int, str]] = {
    ExitCode.DIVERGED: "Diverged",
    ExitCode.HARDWARE: "Hardware",
    ExitCode.PEER_LOST: "Collateral",
    ExitCode.HANG: "Hang",
    ExitCode.SIGTERM: "Collateral",  # it was asked to end; who asked is the cause
}
#: Kinds of a report whose cause is known, whatever the process says.
_CERTAIN: Final = ("lost", "oom", "hardware", "drill")


def class_of(code: int | None, number: int | None, other: str = "User", kind: str = "") -> str:
    """Class an end by its exit code and signal. ``other``: of a code that means nothing.

    SIGKILL comes from outside the program, of unknown origin: charged all the same. It
    may be the kernel, short of memory, where it hit a child and Kubernetes saw no OOMKilled.
    ``kind``: a report's. A program without our library may use 75 for anything.
    """
    own = code == ExitCode.PEER_LOST and kind in ("exit", "exception")
    found = other if code is None or own else CLASSES.get(code, other)
    return "Killed" if found == "User" and number == signal.SIGKILL else found


def final_class(code: int | None, number: int | None, kind: str = "") -> str:
    """Class the end of a container: no restart cures a permanent code."""
    return "Permanent" if code in PERMANENT_EXIT_CODES else class_of(code, number, kind=kind)


def kind_of(kind: str, exception: str) -> str:
    """Return leftEarly or unresolved if an exception says so: here alone its words are read."""
    named = {UNRESOLVED: "unresolved", LEFT_EARLY: "leftEarly"} if kind not in _CERTAIN else {}
    return next((name for words, name in named.items() if words in exception), kind)


def alike(one: str, other: str, most: int | None = None) -> bool:
    """Tell whether two exceptions are the same but for their numbers. ``most``: characters."""
    first, second = (_NUMBER.sub("#", text)[:most] for text in (one, other))
    return first == second


def settled(code: int | None) -> str:
    """Class a collateral loss when nobody else turned out to be the cause."""
    return "Disruption" if code == ExitCode.SIGTERM else "Infrastructure"


def unstarted(cls: str, reason: str, code: int | None) -> bool:
    """Tell whether a node's kubelet or runtime would not start a pod's container."""
    never = code is None and reason not in _RAN
    return cls == "Infrastructure" and (never or reason == "StartError")


def recurs(cls: str, reason: str, code: int | None) -> bool:
    """Tell whether such an end, free of charge, is the job's doing if it comes again and again."""
    return reason == UNRESOLVED_NAMES or unstarted(cls, reason, code)


def action_of(cls: str) -> Action:
    """Return what follows a loss of this class where no rule of the user's matches."""
    if cls in ("Permanent", "Diverged"):  # trying again cannot help
        return "Fail"
    return "RestartFree" if cls in FREE else "Restart"


def signal_of(code: int | None) -> int | None:
    """Return the signal that an exit code of 128+n tells of."""
    return code - 128 if code is not None and 128 < code < 128 + signal.NSIG else None


def reason_of(code: int | None, number: int | None) -> str:
    """Name an end: SIGKILL, or ExitCode1."""
    if not number:
        return f"ExitCode{code}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"Signal{number}"


def reasons_of(code: int) -> set[str]:
    """Return the reasons by which rules match a process's end, while its container still runs."""
    number = signal_of(code)
    return {reason_of(code, number), class_of(code, number), "Error"}


def final_codes(ruled: Callable[[int, set[str]], str | None]) -> list[int]:
    """Return the codes for which the user's rules want no restart, nor one in place."""
    return [code for code in range(1, 256) if ruled(code, reasons_of(code)) == "Fail"]


def backoff(in_a_row: int, first: float, most: float) -> float:
    """Return the seconds before the n-th restart in a row: 0, then ``first``, doubling."""
    if in_a_row <= 1:
        return 0.0
    # Doublings beyond any sensible maximum are left out: floats stay finite.
    return min(most, first * 2.0 ** min(in_a_row - 2, 60))
