"""What follows a failed attempt: the operator's rules for exit codes, budgets and delays.

The operator's are core/classify.py and core/policy/restart.py; a test holds the two equal. Its long
waits for a start that fails are left out: here somebody looks on, and mends the script.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddpjob_contract import PERMANENT_EXIT_CODES, ExitCode
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.local.manifest import Manifest

_CLASSES: Final[Mapping[int, str]] = {
    **dict.fromkeys(PERMANENT_EXIT_CODES, "Permanent"),
    ExitCode.HARDWARE: "Hardware",
    ExitCode.DIVERGED: "Diverged",
    ExitCode.HANG: "Hang",
    ExitCode.SIGKILL: "Killed",
    ExitCode.UNKNOWN: "Infrastructure",
    ExitCode.PEER_LOST: "Collateral",
    ExitCode.SIGTERM: "Collateral",
}
_OTHER: Final = "User"
#: From the strongest cause to the weakest.
_SEVERITY: Final = (
    "Permanent", "Hardware", "Diverged", "Hang", "Killed", _OTHER, "Infrastructure", "Collateral",
)  # fmt: skip
#: What they are when nobody else turned out to be the cause.
_SETTLED: Final[Mapping[int, str]] = {
    ExitCode.PEER_LOST: "Infrastructure",
    ExitCode.SIGTERM: "Disruption",
}
_MATCHES: Final = (("exitCodes", int, "numbers"), ("reasons", str, "strings"))
_ACTIONS: Final = {
    **dict.fromkeys(("Permanent", "Diverged"), "Fail"),
    **dict.fromkeys(("Hardware", "Infrastructure", "Collateral"), "RestartFree"),
}


def severity(code: int) -> int:
    """The least is the cause."""
    return _SEVERITY.index(_CLASSES.get(code, _OTHER))


def collateral(code: int) -> bool:
    """Somebody else may have failed first, and not have ended yet."""
    return _CLASSES.get(code) == "Collateral"


def _reasons(code: int) -> set[str]:
    """What a rule can call it, before a launcher ends with it."""
    found = _CLASSES.get(code, _OTHER)
    return {_name(code), _OTHER if found == "Permanent" else found, "Error"}


def _name(code: int) -> str:
    if not 128 < code < 128 + signal.NSIG:
        return f"ExitCode{code}"
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return f"Signal{code - 128}"


@dataclass(frozen=True, slots=True)
class Limits:
    """spec.restart. Times in seconds."""

    max_restarts: int
    max_disruptions: int
    initial_seconds: int
    max_seconds: int
    in_place: int  # rounds without progress before the attempt ends; 0: no rounds
    heal_after: int
    rules: tuple[Mapping[str, Any], ...]
    drill: str = "Auto"

    def action(self, code: int) -> str:
        """Restart, RestartFree or Fail."""
        found = _CLASSES.get(code, _OTHER)
        ruled = self._ruled(code, {_name(code), _SETTLED.get(code, found), "Error"})
        return ruled or _ACTIONS.get(found, "Restart")

    def final_codes(self) -> list[int]:
        """After these the rules want no restart, so none in place either."""
        return [code for code in range(1, 256) if self._ruled(code, _reasons(code)) == "Fail"]

    def _ruled(self, code: int, reasons: set[str]) -> str | None:
        matching = (
            rule["action"]
            for rule in self.rules
            if code in rule.get("exitCodes", ()) or reasons & set(rule.get("reasons", ()))
        )
        return next(matching, None)


def limits_of(manifest: Manifest) -> Limits:
    """Raises ConfigError."""
    value = manifest.setting
    rules = (manifest.spec.get("restart") or {}).get("rules") or []
    if not all(rule.get("action") in ("Restart", "RestartFree", "Fail") for rule in rules):
        raise ConfigError("spec.restart.rules: each needs an action: Restart, RestartFree or Fail")
    for on, kind, what in _MATCHES:
        for given in (rule.get(on, []) for rule in rules):
            if not isinstance(given, list) or not all(type(one) is kind for one in given):
                raise ConfigError(f"spec.restart.rules: {on}: {given!r} must be a list of {what}")
    on = value("restart.inPlace.enabled") and value("restart.maxRestarts") > 0
    return Limits(
        max_restarts=value("restart.maxRestarts"),
        max_disruptions=value("restart.maxDisruptions"),
        initial_seconds=value("restart.backoff.initialSeconds"),
        max_seconds=value("restart.backoff.maxSeconds"),
        in_place=value("restart.inPlace.maxWithoutProgress") if on else 0,
        heal_after=value("restart.healAfterSeconds"),
        rules=tuple(rules),
        drill=value("restart.inPlace.drill"),
    )


class Budget:
    """How many restarts are left; progress and time without a failure make it whole."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._charged = self._free = self._in_a_row = 0
        self._progress = (-1, -1)

    def after(self, code: int, seconds: float, progress: tuple[int, int]) -> tuple[float, str]:
        """Seconds until the next attempt, below 0: none follows; and what to say.

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
        free = action == "RestartFree"
        self._free, self._charged = self._free + free, self._charged + (not free)
        self._in_a_row += 1
        name, most = ("maxDisruptions", limits.max_disruptions) if free else (
            "maxRestarts", limits.max_restarts,
        )  # fmt: skip
        used = self._free if free else self._charged
        if used > most:
            return -1, f"restart.{name} {most} is used up"
        doubled = limits.initial_seconds * 2.0 ** min(self._in_a_row - 2, 60)
        delay = min(limits.max_seconds, doubled) if self._in_a_row > 1 else 0
        return delay, f"restarting in {delay:g} s (restart {used} of {name} {most})"
