"""The way of operators to the API server, and all that may befall a call on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpjob_operator.shell.api import WORKLOADS, ApiError, Listing, Resource, error_from_status
from model.cluster import Cluster, Object


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


#: Asked before each call; what it returns happens to the call. See Wire. An error is the answer.
Harm = str | ApiError
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
        if isinstance(harm, ApiError):
            raise harm
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
            with contextlib.suppress(ApiError):  # nobody hears of it
                do()


class Caller(Protocol):
    """An operator, as its calls see it; ``working``: they are counted and may be harmed."""

    wire: Wire
    name: str
    dead: bool
    working: bool


class ModelApi:
    """shell.api.Api of one operator. Holds the operator to its manners (I22)."""

    def __init__(self, operator: Caller) -> None:
        self._operator = operator
        self.behind: dict[str, int] = {}  # a list shows the world as it was so many writes ago

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Any:
        return await self._send("get", resource, name, lambda c: c.get(resource.plural, name))

    async def create(
        self, resource: Resource, namespace: str, body: Object, *, strict: bool = False
    ) -> Any:
        known = strict or resource == WORKLOADS  # Kueue's definition may be older than the pods'
        assert known, "unknown fields would be dropped without a word"
        by = self._operator.name
        do = lambda c: c.create(resource.plural, body, by)  # noqa: E731
        return await self._send("create", resource, body["metadata"]["name"], do)

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, *, sub: str = ""
    ) -> Any:
        assert sub == "status" or resource == WORKLOADS, "the spec is never written"
        assert body["metadata"].get("resourceVersion"), "a write is guarded by its version"
        by = self._operator.name
        replace = "replace_status" if sub else "replace_spec"
        do = lambda c: getattr(c, replace)(resource.plural, name, body, by)  # noqa: E731
        return await self._send("replace", resource, name, do)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str,
        version: str = "",
        grace: int | None = None,
    ) -> Any:
        assert uid, "a deletion names the uid"
        by = self._operator.name
        do = lambda c: c.delete(resource.plural, name, uid, grace, by, version)  # noqa: E731
        return await self._send("delete", resource, name, do)

    async def list_all(
        self,
        resource: Resource,
        namespace: str | None,
        selector: str = "",
        *,
        keep: Callable[[Object], Any] = dict,
    ) -> Listing:
        def do(cluster: Cluster) -> Listing:
            items, version = cluster.list(
                resource.plural, selector, self.behind.get(resource.plural, 0)
            )
            return Listing([keep(item) for item in items], str(version))

        return await self._send("list", resource, selector, do)  # type: ignore[no-any-return]

    async def _send(self, verb: str, resource: Resource, name: str, do: Any) -> Any:
        operator = self._operator
        cluster = operator.wire.cluster
        if operator.dead:
            raise Crash
        if not operator.working:
            return do(cluster)  # the lists of the start and the resync are not counted
        call = Call(len(operator.wire.calls), verb, resource.plural, name, operator.name)
        try:
            return await operator.wire.send(call, lambda: do(cluster))
        except Crash:
            operator.dead = True  # calls under way beside this one never leave
            raise


def _answer(harm: str) -> ApiError:
    code, reason, message = _ANSWERS[harm]
    return error_from_status(code, {"reason": reason, "message": message})
