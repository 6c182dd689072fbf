"""An API server that refuses, stalls, forgets to answer, and loses events.

Errors are injected at each write of a restart; the gang must come back all the same, with one
restart, and nothing may be created twice.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest

from support.arena import Arena
from support.proxy import Call, Fault, Harm
from support.rest import Object, eventually

REPLICAS = 2
WRITES = 3 + 2 * REPLICAS


@pytest.fixture
def gang(stage: Arena) -> Iterator[str]:
    name = f"gang-{secrets.token_hex(2)}"
    yield name
    stage.proxy.faults = []
    stage.proxy.swallow = lambda _: False
    stage.remove(name)


def ready(stage: Arena, name: str) -> None:
    stage.wait_phase(name, "Running")
    stage.wait_status(
        name, "all ready", lambda s: s["replicas"]["ready"] == s["replicas"]["desired"]
    )


def fault_at(harm: Harm, code: int, name: str, write: int) -> Fault:
    def match(call: Call) -> bool:
        return call.is_write and name in call.target

    headers = {"Retry-After": "1"} if code == 429 else {}
    return Fault(harm, match, skip=write, code=code, headers=headers)


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        ("answer", 409),
        ("lose-reply", 0),
        *(
            pytest.param(*one, marks=pytest.mark.tier("all"))
            for one in [*(("answer", code) for code in (403, 429, 500, 504)), ("lose-call", 0)]
        ),
    ],
    ids=["409", "lost-reply", "403", "429", "500", "504", "lost-call"],
)
@pytest.mark.fault("A1", "A4")
def test_trouble_at_each_write(stage: Arena, harm: Harm, code: int) -> None:
    names = [f"w{write}-{secrets.token_hex(2)}" for write in range(WRITES)]
    for name in names:
        stage.apply(name, replicas=REPLICAS)
    for name in names:
        ready(stage, name)
    stage.proxy.clear()
    faults = [fault_at(harm, code, name, write) for write, name in enumerate(names)]
    stage.proxy.faults = faults
    for name in names:
        stage.kubelet.finish(f"{name}-1", 1, "boom")
    for name in names:
        status = stage.wait_phase(name, "Running", attempt=2)
        assert status["restarts"]["total"] == 1, name
        assert stage.attempts(name) == [(f"{name}-{r}", "2") for r in range(REPLICAS)]
    assert [fault.met for fault in faults] == [1] * WRITES
    made = Counter(
        call.target for call in stage.proxy.calls if call.method == "POST" and call.code == 201
    )
    assert made.most_common(1)[0][1] == 1, "no object is created twice"
    for name in names:
        stage.remove(name)


@pytest.mark.parametrize("code", [403, 429, 502, 503])
@pytest.mark.fault("A4")
def test_a_refusal_in_plain_text_is_told_and_survived(stage: Arena, gang: str, code: int) -> None:
    """As by a proxy in front, or by the API server's own limiter: no Status, only words."""

    def match(call: Call) -> bool:
        return call.method == "POST" and f"pods/{gang}-" in call.target

    words = "please come back later"
    fault = Fault("answer", match, times=10_000, code=code, text=words)
    fault.headers = {"Retry-After": "0"} if code == 429 else {}
    stage.proxy.faults = [fault]
    stage.apply(gang, replicas=REPLICAS)
    status = stage.wait_status(
        gang,
        "it tells of the refusal",
        lambda s: any(words in c["message"] for c in s.get("conditions") or ()),
    )
    told = next(c for c in status["conditions"] if words in c["message"])
    assert told["reason"] == "CreationFailed", "the words of HTTP are no reason"
    stage.proxy.faults = []
    ready(stage, gang)
    assert stage.status(gang)["restarts"]["total"] == 0


@pytest.mark.fault("O3")
def test_a_job_whose_deletion_no_watch_told_is_forgotten(stage: Arena, gang: str) -> None:
    stage.apply(gang)
    ready(stage, gang)

    def of_the_job(event: Object) -> bool:
        obj = event["object"]
        return bool(obj.get("kind") == "DDPJob" and obj["metadata"].get("name") == gang)

    stage.proxy.swallow = of_the_job
    stage.rest.delete(stage.job_path(gang))
    eventually(
        "the resync notices",
        # The list tells, or a status write that meets 404: the collector removes the pods too.
        lambda: re.search(rf"{stage.namespace}/{gang}: (vanished|gone)", stage.operators[0].log()),
    )
    assert gang not in [call.target for call in stage.proxy.writes()]


@pytest.mark.fault("O3")
def test_kopf_is_started_again_when_its_list_ends_it(stage: Arena, gang: str) -> None:
    """By 404; ERROR events that end its watch are plans."""
    operator = stage.operators[0]
    before = operator.log().count("starting it again")
    stage.proxy.faults = [
        Fault(
            "answer",
            lambda c: c.path == stage.job_path() and c.agent.startswith("kopf"),
            code=404,
        )
    ]
    stage.proxy.errors_next = [("/ddpjobs", 410)]  # so that kopf lists again
    stage.proxy.cut_watches()
    eventually("the watch ends", lambda: operator.log().count("starting it again") > before)
    stage.apply(gang)
    ready(stage, gang)
    assert operator.process is not None
    assert operator.process.poll() is None, "the process lives on"
