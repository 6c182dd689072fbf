"""Decide the answer to a failed attempt, by the operator's rules, budgets and delays.

command.py asks. The classes are ddpjob_contract.exits, as the operator's. Left out are its long
waits for a start that fails, and its end of a job by one exception that comes again and again
(SameFailure): here somebody looks on, and repairs the script.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpjob_contract import ExitCode, exits
from ddpjob_tools.local.manifest import Manifest


def _class(code: int) -> str:
    return exits.final_class(code, exits.signal_of(code))


def severity(code: int) -> int:
    """Rank a code; the least is the cause."""
    return exits.SEVERITY.index(_class(code))


def collateral(code: int) -> bool:
    """Return whether somebody else may have failed first, and not have ended yet."""
    return _class(code) == "Collateral"


@dataclass(frozen=True, slots=True)
class Rule:
    """One of spec.restart.rules."""

    codes: frozenset[int]
    reasons: frozenset[str]
    action: str


@dataclass(frozen=True, slots=True)
class Limits:
    """spec.restart. Times in seconds."""

    max_restarts: int
    max_disruptions: int
    initial_seconds: int
    max_seconds: int
    in_place: int  # rounds without progress before the attempt ends; 0: no rounds
    heal_after: int
    rules: Sequence[Rule]
    drill: str = "Auto"

    def action(self, code: int) -> str:
        """Return Restart, RestartFree or Fail."""
        cls = _class(code)
        if cls == "Collateral":  # on one machine no peer is lost without a cause that shows
            cls = "User" if code == ExitCode.PEER_LOST else exits.settled(code)
        reasons = {exits.reason_of(code, exits.signal_of(code)), cls, "Error"}
        return self.ruled(code, reasons) or exits.action_of(cls)

    def ruled(self, code: int, reasons: set[str]) -> str | None:
        """Return the action of the first rule that matches, None if none does."""
        matching = (r.action for r in self.rules if code in r.codes or reasons & r.reasons)
        return next(matching, None)


def limits_of(manifest: Manifest) -> Limits:
    """Read the limits of a manifest. Raises ConfigError."""
    value = manifest.setting
    on = value("restart.inPlace.enabled") and value("restart.maxRestarts") > 0
    return Limits(
        max_restarts=value("restart.maxRestarts"),
        max_disruptions=value("restart.maxDisruptions"),
        initial_seconds=value("restart.backoff.initialSeconds"),
        max_seconds=value("restart.backoff.maxSeconds"),
        in_place=value("restart.inPlace.maxWithoutProgress") if on else 0,
        heal_after=value("restart.healAfterSeconds"),
        rules=tuple(_rules(manifest)),
        drill=value("restart.inPlace.drill"),
    )


def _rules(manifest: Manifest) -> Iterator[Rule]:
    for rule in manifest.spec["restart"]["rules"].items():
        if rule["action"].value not in ("Restart", "RestartFree", "Fail"):
            raise rule["action"].odd("Restart, RestartFree or Fail")
        codes = (one.whole() for one in rule["exitCodes"].items())
        reasons = (one.text() for one in rule["reasons"].items())
        yield Rule(frozenset(codes), frozenset(reasons), rule["action"].text())


class Budget:
    """How many restarts are left; progress and time without a failure make it whole."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._charged = self._free = self._in_a_row = 0
        self._progress = (-1, -1)

    def after(self, code: int, seconds: float, progress: tuple[int, int]) -> tuple[float, str]:
        """Return the seconds until the next attempt, and what to say. Below 0: none follows.

        ``seconds``: what the attempt lasted. ``progress``: the newest snapshot's step, the newest
        mtime at progressPath.
        """
        limits = self._limits
        newer = any(now > then for now, then in zip(progress, self._progress, strict=True))
        if newer or 0 < limits.heal_after <= seconds:
            self._charged = self._free = self._in_a_row = 0
        if seconds > limits.max_seconds:
            self._in_a_row = 0
        self._progress = progress
        action = limits.action(code)
        if action == "Fail":
            return -1, "no restart can cure it"
        self._in_a_row += 1
        if action == "RestartFree":
            self._free += 1
            used, most, name = self._free, limits.max_disruptions, "maxDisruptions"
        else:
            self._charged += 1
            used, most, name = self._charged, limits.max_restarts, "maxRestarts"
        if used > most:
            return -1, f"restart.{name} {most} is used up"
        delay = exits.backoff(self._in_a_row, limits.initial_seconds, limits.max_seconds)
        return delay, f"restarting in {delay:g} s (restart {used} of {name} {most})"
