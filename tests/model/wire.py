"""The way of operators to the API server, and all that may befall a call on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob_operator.shell.api import errors
from model.cluster import Cluster


class Crash(BaseException):
    """The process is gone, in the middle of a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, numbered through all operators of a world."""

    number: int
    verb: str
    plural: str
    name: str
    operator: str

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list")


#: Asked before each call; what it returns happens to the call. See Wire.
Harm = str
Gate = Callable[[Call], Harm]

_ANSWERS: Mapping[str, tuple[int, str, str]] = {
    "409": (409, "Conflict", "injected"),
    "403": (403, "Forbidden", "injected: RBAC"),
    "quota": (403, "Forbidden", "exceeded quota: injected"),
    "422": (422, "Invalid", "injected"),
    "429": (429, "TooManyRequests", "injected"),
    "500": (500, "InternalError", "injected"),
    "lost-call": (0, "", "injected: no answer"),
}


@dataclass
class Wire:
    """The way of all operators to the API server, and what happens to calls on it.

    Harms: "" none; crash-before, crash-after: the operator dies before or after the server
    has done it; lost-reply: done, no answer; 500-done: done, and an error; late: no answer,
    and done much later (see deliver_late); hold: the call waits until ``release``; or one of
    _ANSWERS, not done.
    """

    cluster: Cluster
    gate: Gate = lambda call: ""
    calls: list[Call] = field(default_factory=list)
    late: list[Callable[[], object]] = field(default_factory=list)
    on_hold: Callable[[asyncio.Future[None]], None] = lambda call: None

    async def send(self, call: Call, do: Callable[[], Any]) -> Any:
        self.calls.append(call)
        harm = self.gate(call)
        if harm == "crash-before":
            raise Crash
        if harm == "hold":
            held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_hold(held)
            await held
            harm = ""
        if harm in _ANSWERS:
            raise _answer(harm)
        if harm == "late":
            self.late.append(do)
            raise _answer("lost-call")
        done = do()
        if harm == "crash-after":
            raise Crash
        if harm == "lost-reply":
            raise _answer("lost-call")
        if harm == "500-done":
            raise _answer("500")
        return done

    def deliver_late(self) -> None:
        """What was under way arrives after all."""
        late, self.late = self.late, []
        for do in late:
            with contextlib.suppress(errors.ApiError):  # nobody hears of it
                do()


def _answer(harm: str) -> errors.ApiError:
    code, reason, message = _ANSWERS[harm]
    return errors.from_status(code, {"reason": reason, "message": message})
