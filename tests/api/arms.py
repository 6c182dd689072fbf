"""What can be done to a story: each function arms one fault before the story begins.

The proxy meets the operator's calls and what its watches tell; a second operator is a process
like the first; rights are taken in the API server itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from api.roles import happening
from api.story import QUIET, Play
from support.invariants import NODES
from support.proxy import Call, Fault, Harm
from support.rest import Object

Arm = Callable[[Play, str], None]
Rule = dict[str, Any]

#: 20 minutes by the operator's own measure: it lists every second here, every 30 in a cluster.
OUTAGE = 40.0
#: Seconds in which an operator that is wrong would come to it.
LURE = 3.0


# --- at a write ---------------------------------------------------------------------------


def _at_write(harm: Harm, code: int = 0, **more: Any) -> Arm:
    def arm(play: Play, place: str) -> None:
        headers = {"Retry-After": "1"} if code == 429 else {}
        fault = Fault(harm, lambda c: play.role(c) == place, code=code, headers=headers, **more)
        play.stage.proxy.faults.append(fault)
        play.armed.append(lambda: fault.met)
        if harm.startswith("kill"):
            play.outcome.deaths, play.outcome.again = 1, 1
        if harm in ("late", "again"):
            play.stage.history.state.deposed = True
            fault.until = _next(play, place)

    return arm


def _next(play: Play, place: str) -> Callable[[Call], bool]:
    """A held call arrives when its time is long over: an attempt later, or a phase."""

    def passes(call: Call) -> bool:
        found = play.role(call)
        if place.startswith("create-pod"):
            replica = place.split("-")[2]
            return found in (f"create-pod-{replica}-of-2", "status-succeeded-2") and found != place
        if place.startswith("delete-pod"):
            return found == ("delete-job" if place.endswith("2") else "status-running-2")
        return found.startswith("status") and found != place

    return passes


AT_A_WRITE: Mapping[str, Arm] = {
    "crash-before": _at_write("kill-before"),
    "crash-after-commit": _at_write("kill-commit"),
    "crash-after-reply": _at_write("kill-reply"),
    "409": _at_write("answer", 409),
    "403": _at_write("answer", 403),
    "429": _at_write("answer", 429),
    "500": _at_write("answer", 500),
    "503": _at_write("answer", 503),
    "504-after-commit": _at_write("answer-after", 504),
    "reset-before": _at_write("lose-call"),
    "reset-after-commit": _at_write("lose-reply"),
    "arrives-late": _at_write("late"),
    "arrives-twice": _at_write("again"),
}

# --- of what is seen ----------------------------------------------------------------------


def _once(play: Play, place: str) -> Callable[[Object], bool]:
    """The first event of that name."""
    met: list[Object] = []
    play.armed.append(lambda: met)

    def match(event: Object) -> bool:
        obj = event["object"]
        if met or event["type"] in ("ERROR", "BOOKMARK"):
            return False
        if happening(event["type"], obj) == place:
            met.append(event)
        return bool(met)

    return match


def _lost(play: Play, place: str) -> None:
    play.stage.proxy.swallow = _once(play, place)


def _delayed(play: Play, place: str) -> None:
    match = _once(play, place)
    play.stage.proxy.stall = lambda event: 3.0 if match(event) else 0.0


def _doubled(play: Play, place: str) -> None:
    play.stage.proxy.repeat = _once(play, place)


def _lost_in_a_gap(play: Play, place: str) -> None:
    """The watch breaks with the event, and is too old when it is taken up: a list must tell."""
    match = _once(play, place)

    def swallow(event: Object) -> bool:
        if not match(event):
            return False
        plural = "/ddpjobs" if place.startswith("job") else "/pods"
        play.stage.proxy.errors_next.append((plural, 410))
        play.stage.proxy.cut_watches()
        return True

    play.stage.proxy.swallow = swallow


def slow_to_end(play: Play, place: str) -> None:
    """The pod takes some seconds to end: nothing may be made beside it."""
    since: list[float] = []

    def keeps(pod: Object) -> bool:
        name = happening("MODIFIED", {"kind": "Pod", **pod})
        if name != place:
            return False
        since.append(time.monotonic())
        return since[-1] - since[0] < LURE

    play.stage.kubelet.keeps = keeps
    play.armed.append(lambda: since)


OF_AN_EVENT: Mapping[str, Arm] = {
    "event-lost": _lost,
    "lost-in-a-gap": _lost_in_a_gap,
    "event-delayed": _delayed,
    "event-doubled": _doubled,
}


def _watch_ends(plural: str, code: int) -> Arm:
    def arm(play: Play, place: str) -> None:
        def act() -> None:
            play.stage.proxy.errors_next.append((f"/{plural}", code))
            play.stage.proxy.cut_watches()

        play.moments[place] = act

    return arm


def _version(play: Play, behind: int) -> str:
    """The resourceVersion of the namespace so many events ago."""
    events = [one for one in play.stage.history.events() if one.write.plural != NODES]
    return str(events[max(0, len(events) - 1 - behind)].version)


def _stale(behind: int) -> Arm:
    """It dies; the first lists of the next one come from a cache that is so many events behind."""

    def arm(play: Play, place: str) -> None:
        def age() -> None:
            at = _version(play, behind)
            for agent, end in (("ddpjob", "/ddpjobs"), ("kopf", "/ddpjobs"), ("ddpjob", "/pods")):
                stale = Fault("stale", partial(_is_list, agent, end), version=at)
                play.stage.proxy.faults.append(stale)
                play.armed.append(lambda stale=stale: stale.met)

        fault = Fault("kill-before", lambda c: play.role(c) == place, then=age)
        play.stage.proxy.faults.append(fault)
        play.outcome.deaths += 1

    return arm


def _old_pods(behind: int) -> Arm:
    """It dies; the next one sees jobs as they are, and pods for some seconds as they were."""

    def arm(play: Play, place: str) -> None:
        slow: list[float] = []

        def age() -> None:
            at = _version(play, behind)
            match = partial(_is_list, "ddpjob", "/pods")
            stale = Fault("stale", match, version=at, then=lambda: slow.append(LURE))
            play.stage.proxy.faults.append(stale)
            play.armed.append(lambda: stale.met)

        def stall(event: Object) -> float:
            return slow.pop() if slow and event["object"].get("kind") == "Pod" else 0.0

        play.stage.proxy.stall = stall
        fault = Fault("kill-reply", lambda c: play.role(c) == place, then=age)
        play.stage.proxy.faults.append(fault)
        play.outcome.deaths += 1

    return arm


def _is_list(agent: str, end: str, call: Call) -> bool:
    """By the resync, by kopf or by the informer; a barrier's list is of a quorum."""
    mine = call.method == "GET" and call.agent.startswith(agent) and call.path.endswith(end)
    return mine and "job-uid%3D" not in call.query


OF_A_VIEW: Mapping[str, Arm] = {
    **{
        f"{plural}-watch-ends-{code}": _watch_ends(plural, code)
        for plural in ("ddpjobs", "pods")
        for code in (410, 429, 500, 504)
    },
    **{f"restart-stale-{behind}": _stale(behind) for behind in (1, 3, 9)},
    **{f"restart-old-pods-{behind}": _old_pods(behind) for behind in (3, 9)},
}

# --- of others ----------------------------------------------------------------------------


def _second(play: Play, place: str) -> None:
    """From then on another operator acts, too, as after a pause of the one with the lease."""
    play.stage.history.state.deposed = True
    play.outcome.extra += 60
    other = play.stage.operator(*QUIET, "--lease-name", "another", name="op-b")
    play.stage.operators.remove(other)

    def act() -> None:
        play.stage.operators.append(other.start())

    play.moments[place] = lambda: play.later(0, act)


def _away(play: Play, place: str) -> None:
    """The API server answers 503 to everything, watches included."""
    play.outcome.deaths += 40  # it loses its lease, and ends again and again
    play.flags = ("--lease-seconds", "15")
    play.outcome.extra += 100
    proxy = play.stage.proxy

    def act() -> None:
        fault = Fault("answer", lambda c: True, code=503, times=1_000_000, watches=True)
        proxy.faults.insert(0, fault)
        proxy.cut_watches()
        play.later(OUTAGE, lambda: proxy.faults.remove(fault))

    play.moments[place] = lambda: play.later(0, act)


def _rotated(play: Play, place: str) -> None:
    """The token ends, and for a while nobody has told the operator of the next one."""
    play.outcome.deaths += 3
    stage = play.stage
    stage.use_token("old")
    stage.proxy.tokens = {"old"}

    def act() -> None:
        stage.proxy.tokens = {"new"}
        stage.proxy.cut_watches()
        play.later(1.5, lambda: stage.use_token("new"))

    play.moments[place] = act


OF_ANOTHER: Mapping[str, Arm] = {
    "second-operator": _second,
    "away-20-minutes": _away,
    "token-rotated": _rotated,
}


# --- rights -------------------------------------------------------------------------------


def verbs(rules: list[Rule]) -> Iterator[tuple[Rule, str, str]]:
    """Each (rule, resource, verb)."""
    for rule in rules:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                yield rule, resource, verb


#: So long after the first refusal. Of one that does not wait there would be hundreds by then.
LOST = 3.0
REFUSED_AT_MOST = 30


def lose_right(rules: list[Rule], rule: Rule, resource: str, verb: str) -> Arm:
    """It lacks one verb of one rule until it has missed it; it says so, and does not storm."""
    words = f'cannot {verb} resource "{resource}"'

    def arm(play: Play, place: str) -> None:
        play.outcome.deaths += 20  # without its lease it ends
        play.outcome.extra += 100
        less = [{**r, "verbs": [v for v in r["verbs"] if v != verb]} if r == rule else r
                for r in rules]  # fmt: skip
        play.eager = True
        stage = play.stage
        rights = stage.rights()
        rights.give(less)
        put_right = _spoil(play, place)

        def missed() -> list[str]:
            return [call.target for call in stage.proxy.calls if call.code == 403]

        def wait() -> None:
            play.later(LOST if missed() else 0.5, give_back if missed() else wait)

        def give_back() -> None:
            assert len(missed()) <= REFUSED_AT_MOST, missed()
            rights.give(rules)
            put_right()

        def said() -> bool:
            events = (str((call.body or {}).get("message")) for call in stage.proxy.calls)
            logs = (operator.log_path.read_text() for operator in stage.operators)
            return any(words in one for one in (*events, *logs))

        play.later(0, wait)
        play.armed.append(said)

    return arm


def _spoil(play: Play, place: str) -> Callable[[], None]:
    """Make the operator use a right that it seldom needs; what undoes that."""
    rest, stage = play.stage.rest, play.stage
    if place == "get-pods":
        spec = {"schedulerName": "hand", "containers": [{"name": "c", "image": "i"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-1"}, "spec": spec}
        rest.post(stage.path("pods"), pod)
        return lambda: void(rest.delete(stage.path("pods", "job-1"), grace=0))
    groups = {"update-services": "/api/v1", "update-networkpolicies": "/apis/networking.k8s.io/v1"}
    if place in groups:
        path = stage.path(place.removeprefix("update-"), "job", groups[place])
        wrong = {"selector": {"a": "b"}} if "services" in place else {"ingress": []}
        play.moments["status-restarting-2"] = lambda: void(rest.merge(path, {"spec": wrong}))
    return lambda: None


def void(_: object) -> None:
    """For a lambda that gives nothing back."""
