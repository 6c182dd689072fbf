"""An API server that answers in plain text, forgets to tell, and loses events.

What it refuses at each write of a story is played by plans (test_plans.py).
"""

import re

import pytest

from support.arena import Arena
from support.proxy import Call, Fault
from support.rest import Object, eventually

REPLICAS = 2


def ready(stage: Arena, name: str) -> None:
    stage.wait_phase(name, "Running")
    stage.wait_status(
        name, "all ready", lambda s: s["replicas"]["ready"] == s["replicas"]["desired"]
    )


@pytest.mark.parametrize("code", [403, 429, 503])
@pytest.mark.fault("A4")
def test_a_refusal_in_plain_text_is_told_and_survived(stage, gang, code):
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
def test_a_job_whose_deletion_no_watch_told_is_forgotten(stage, gang):
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
        lambda: re.search(
            rf"{stage.namespace}/{gang}: (deleted, and the watch|gone)", stage.operators[0].log()
        ),
    )
    assert gang not in [call.target for call in stage.proxy.writes()]
