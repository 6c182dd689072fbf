"""The operator dies at each write of a restart: before it, after it was stored, after the reply.

Each time: the same end as undisturbed, no extra restart, no orphan, and no object created or
deleted more often than undisturbed, but for the one write at which it died.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from api.roles import deciding
from support.arena import Arena, arena
from support.cluster import Cluster
from support.proxy import Call, Fault, Harm
from support.rest import eventually

HARMS: tuple[Harm, ...] = ("kill-before", "kill-commit", "kill-reply")
REPLICAS = 2
#: The writes that make a restart of two replicas: intent, 2 deletions, Starting, 2 creations,
#: Running. What is written later only reports.
WRITES = 3 + 2 * REPLICAS


@pytest.fixture(scope="module")
def stage(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena(control_plane.kubeconfig, tmp_path_factory.mktemp("crash"), forked=True) as found:
        found.start_operator()
        yield found


def changes(calls: list[Call]) -> Counter[str]:
    """Creations and deletions per object."""
    return Counter(call.target for call in calls if call.method in ("POST", "DELETE"))


def expected(name: str) -> Counter[str]:
    members = [f"pods/{name}-{replica}" for replica in range(REPLICAS)]
    return Counter([f"{verb} {pod}" for verb in ("DELETE", "POST") for pod in members])


def about(name: str, call: Call) -> bool:
    """A write that concerns this job."""
    return call.is_write and name in call.target


@pytest.mark.parametrize("write", range(WRITES))
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.fault("O1")
def test_killed_at_a_write(stage: Arena, harm: Harm, write: int) -> None:
    name = f"crash-{secrets.token_hex(2)}"
    operator, proxy = stage.operators[0], stage.proxy
    stage.apply(name, replicas=REPLICAS)
    stage.wait_phase(name, "Running")
    stage.wait_status(name, "all ready", lambda s: s["replicas"]["ready"] == REPLICAS)
    proxy.clear()
    fault = Fault(harm, lambda call: about(name, call), skip=write)
    proxy.faults = [fault]
    stage.kubelet.finish(f"{name}-1", 1, "boom")
    operator.wait()
    assert fault.met == 1
    struck = [call for call in proxy.writes() if about(name, call)][write]
    operator.start()
    status = stage.wait_phase(name, "Running", attempt=2)
    assert (status["restarts"]["total"], status["restarts"]["charged"]) == (1, 1)
    assert len(status["failures"]) == 1
    eventually(
        "two members of attempt 2 and nothing else",
        lambda: stage.attempts(name) == [(f"{name}-{r}", "2") for r in range(REPLICAS)],
    )
    done = changes([call for call in proxy.writes() if about(name, call)])
    extra = done - expected(name)
    assert not expected(name) - done
    assert extra in (Counter(), Counter([struck.target])), (extra, struck)
    stage.succeed(name)
    stage.remove(name)


def test_a_restart_has_as_many_writes_as_these_tests_believe(stage: Arena) -> None:
    name = f"calm-{secrets.token_hex(2)}"
    stage.apply(name, replicas=REPLICAS)
    stage.wait_phase(name, "Running")
    stage.wait_status(name, "all ready", lambda s: s["replicas"]["ready"] == REPLICAS)
    stage.proxy.clear()
    since = time.monotonic()
    stage.kubelet.finish(f"{name}-1", 1, "boom")
    stage.wait_phase(name, "Running", attempt=2)
    writes = [call for call in stage.proxy.writes() if about(name, call)]
    took = time.monotonic() - since
    assert changes(writes) == expected(name)
    decided = deciding(writes, "status-running-1", took)
    assert len(decided) == WRITES, [call.target for call in writes]
    stage.remove(name)
