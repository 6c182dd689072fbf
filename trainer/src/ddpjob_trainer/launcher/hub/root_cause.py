"""Find the failure that came first, and name it. Pure.

The hub calls cause_or_wait(); rounds, the supervisor and the termination report call the rest. Who
says that a peer was gone is no cause, unless nobody else is. When only such ends have been seen,
the cause may still be on its way: wait a moment for it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddpjob_contract import LEFT_EARLY, ExitCode, ReportKind, Round

CAUSE_WAIT_SECONDS = 2.0
#: A program without our library may leave its group first, then clean up and print its exception.
#: Shorter than local_round.py's _ANSWER_SECONDS, its patience with a hub that does not answer.
_CLEAN_UP_SECONDS = 8.0
#: One error in the first lines of a script ends all its processes about at once.
_TOGETHER_SECONDS = 5.0
_MAX_WORDS = 300  # of an exception in the launcher's log line
_BY_CODE: dict[int, ReportKind] = {
    ExitCode.PEER_LOST: "peerLost",
    ExitCode.HANG: "hang",
    ExitCode.DIVERGED: "diverged",
    ExitCode.HARDWARE: "hardware",
}
#: Messages of gloo, NCCL and torch's store, in a program that does not end with 75.
_PEER_GONE = re.compile(
    "Connection (closed|reset) by peer|Broken pipe|remote process exited|ncclRemoteError"
    "|failed to recv, got 0 bytes|Timed out waiting .* recv"
)


@dataclass(frozen=True, slots=True)
class Exit:
    """One worker's end. ``status`` is its exit code, or -n for death by signal n."""

    rank: int
    local_rank: int
    status: int
    at: float  # monotonic seconds; workers reaped together share it
    ours: bool = False  # the launcher killed it, so it is not the cause
    exception: str = ""
    step: int = -1  # finished steps, -1: unknown
    done: bool = False  # it had left its training loop, by its last record
    oom: bool = False  # the kernel has OOM-killed it, or a child of it
    foreign: bool = False  # it had no record of our library: the program has chosen its code
    in_script: bool = False  # by an exception of the script, before its first step if steps show
    drill: bool = False  # it ended for a drill, with all others after the same step

    @property
    def code(self) -> int:
        """Return the exit code as a shell has it: 128+n for signal n."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def lost_peer(self) -> bool:
        """Return whether it says, by its code or its transport's words, that a peer was gone."""
        coded = self.code == ExitCode.PEER_LOST and not self.foreign
        return coded or (self.status > 0 and _PEER_GONE.search(self.exception) is not None)


def _order(exit_: Exit) -> tuple[int, float, bool, int]:
    """Order causes before collateral, then by time, then signals first.

    A failed GPU explains the other failures, whenever it was seen.
    """
    first = 2 if exit_.lost_peer else exit_.code != ExitCode.HARDWARE
    return (first, exit_.at, exit_.status > 0, exit_.local_rank)


def first_failure(exits: Collection[Exit]) -> Exit | None:
    """Return the worker that failed first as far as is known, None if none failed."""
    failures = (exit_ for exit_ in exits if exit_.status != 0 and not exit_.ours)
    return min(failures, key=_order, default=None)


def cause_or_wait(
    exits: Sequence[Exit], running: int, now: float, *, rounds: bool = True
) -> Exit | float | None:
    """Return the cause, a monotonic time until which to wait, or None.

    ``rounds``: whether another round may follow, which asks how all processes ended.
    """
    failure = first_failure(exits)
    if failure is None:
        return None
    wait = 0.0
    if failure.lost_peer:
        coded = failure.code == ExitCode.PEER_LOST
        wait = CAUSE_WAIT_SECONDS if coded else _CLEAN_UP_SECONDS
    elif failure.in_script and rounds:
        wait = _TOGETHER_SECONDS
    until = failure.at + wait
    return until if running and now < until else failure


def ended_early(exits: Collection[Exit], cause: Exit | None) -> str:
    """Name ranks that ended with 0 while the rest still trained, "" if none did.

    A success is no failure, but where no rank failed by itself the others lost their peer by it.
    They lose it at once when its interpreter shuts down, a moment before the process has ended.
    """
    if cause is None or not (cause.lost_peer or cause.code == ExitCode.HANG):
        return ""
    ends = [exit_ for exit_ in exits if exit_.status == 0]
    early = [exit_ for exit_ in ends if exit_.at <= cause.at]
    if not early and cause.code != ExitCode.HANG:
        early = [exit_ for exit_ in ends if exit_.at <= cause.at + CAUSE_WAIT_SECONDS]
    if not early:
        return ""
    return f"{named(early)} {LEFT_EARLY} others trained: sys.exit() on some ranks only?"


def ended_long_ago(exits: Collection[Exit], running: int, patience: float, now: float) -> str:
    """Word a warning of ranks that ended with 0 long before others, else "".

    ``patience``: seconds in which others may end as well. It is no failure, yet the others may wait
    for ever. Ranks in a collective notice, or hang until the launcher acts; after its training loop
    nobody waits for a rank.
    """
    ends = (one for one in exits if one.status == 0 and not one.done)
    early = [one for one in ends if now - one.at >= patience]
    if not early or not running:
        return ""
    return (
        f"{named(early)} ended with exit code 0 more than {patience:g} s ago, and {running} of the"
        " others have not ended and may wait for it for ever (sys.exit() on some ranks only?)"
    )


def named(exits: Collection[Exit]) -> str:
    """Name ranks, and the step after which they ended, if all agree on it."""
    ranks = sorted(exit_.rank for exit_ in exits)
    steps = {exit_.step for exit_ in exits}
    after = f" after step {steps.pop()}" if len(steps) == 1 and min(steps) >= 0 else ""
    return f"rank {', '.join(map(str, ranks[:8]))}{after}"


def failure_text(early: str, cause: Exit | None) -> str:
    """Name the ranks that ended early, then the rank that lost them."""
    return f"{early}; then rank {cause.rank}: {cause.exception or cause.code}" if cause else early


def kind(failure: Exit | None, *, exception: str, terminated: bool) -> ReportKind:
    """Name the end for the termination report. ``terminated``: SIGTERM had been received."""
    if failure is None:
        return "success"
    if terminated and failure.code in (ExitCode.SIGTERM, ExitCode.SIGKILL):
        return "sigterm"
    if failure.oom:
        return "oom"
    if failure.status < 0:
        return "sigterm" if -failure.status == signal.SIGTERM else "signal"
    if failure.code == ExitCode.SIGTERM:
        return "sigterm"
    found = None if failure.foreign else _BY_CODE.get(failure.code)
    return found or ("exception" if exception else "exit")


def in_words(record: Round) -> str:
    """Describe the exit that ended a round: SIGKILL, or exit code 1: ValueError: no."""
    named: str = record.get("kind", "peerLost")
    if number := record.get("signal", 0):
        named = signal_name(number)
    elif named in ("exit", "exception"):
        named = f"exit code {record.get('code', 1)}"
    return f"{named}{because(record.get('exception', ''))}"


def because(exception: str) -> str:
    """Format an exception as the suffix of a log line."""
    text = " ".join(exception.split())[:_MAX_WORDS]
    return f": {text}" if text else ""


def signal_name(number: int) -> str:
    """Name a signal, also a realtime signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
