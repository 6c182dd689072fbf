"""The operator of the version before (tests/frozen) and this one follow each other; a gang runs.

The definition is this version's throughout: `helm upgrade` brings it first, and a rollback of the
operator's image alone leaves it.
"""

import http.server
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support import frozen
from support.arena import Arena
from support.operator import PATHS
from support.pods import serving
from support.proxy import Call, Fault
from support.rest import Object, eventually

GANG = "gang"
#: What no change of operators may change: it decides what is done next.
STAYS = (
    "phase", "attempt", "membersSince", "births", "holds", "templateHash", "snapshotHash",
    "restarts", "replicas", "avoidedNodes",
)  # fmt: skip


class Launcher(http.server.BaseHTTPRequestHandler):
    """Answers GET /state as the launcher of replica 0, of whatever version."""

    holds = False

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        state = {"attempt": 1, "holds": self.holds, "step": 41, "snapshotStep": 40, "later": [{}]}
        self.wfile.write(json.dumps({"version": 1, **state}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the operator of the version before."""
    return frozen.unpacked("ddpjob_operator", tmp_path_factory.mktemp("older"))


@pytest.fixture
def port(arena: Arena) -> Iterator[int]:
    """A port of every pod where a launcher answers."""
    with serving(arena.kubelet, Launcher) as found:
        yield found


def take_over(arena: Arena, paths: str) -> None:
    """End the operator that leads, if any, as a rollout does; the next one is of another image."""
    for one in arena.operators:
        if one.process is not None and one.process.poll() is None:
            one.terminate()
    made = arena.operator(paths=paths).start()
    made.wait_ready()
    made.wait_leading()


def decided(status: Object) -> dict[str, Any]:
    """What of a status must outlast a change of operators."""
    found = {name: status.get(name) for name in STAYS}
    found["losses"] = [
        {name: one.get(name) for name in ("attempt", "replica", "class", "exitCode", "replaced")}
        for one in status.get("failures", ())
    ]
    found["times"] = [status["timings"][name] for name in ("startedAt", "attemptStartedAt")]
    found["step"] = status.get("progress", {}).get("step")
    return found


def uids(arena: Arena) -> dict[str, str]:
    pods = arena.kubelet.pods(GANG)
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def settled(arena: Arena) -> tuple[dict[str, Any], dict[str, str]]:
    """What is decided, and the pods, once nothing is left to write."""
    arena.wait_status(GANG, "all ready", lambda s: s["replicas"]["ready"] == 3)
    arena.wait_status(GANG, "its progress", lambda s: s.get("progress", {}).get("step") == 41)
    eventually("the operator is at rest", lambda: arena.quiet_resyncs(2) == [])
    return decided(arena.status(GANG)), uids(arena)


def creates_a_pod(call: Call) -> bool:
    return call.method == "POST" and call.path.endswith("/pods")


def changes_nothing(arena: Arena, paths: str) -> None:
    """Let another version take over: no pod, no counter and no attempt is another than before."""
    before = settled(arena)
    take_over(arena, paths)
    assert settled(arena) == before
    assert not any(map(creates_a_pod, arena.proxy.writes()))


@pytest.mark.parametrize("holds", [False, pytest.param(True, marks=pytest.mark.tier("all"))])
@pytest.mark.fault("O8")
def test_an_upgrade_and_a_rollback_beside_a_gang_change_nothing(
    arena, older, port, monkeypatch, holds
):
    """And each then restarts it once for a loss, or replaces the pod where the others hold."""
    monkeypatch.setattr(Launcher, "holds", holds)
    take_over(arena, older)
    arena.apply(GANG, metrics={"port": port})
    arena.wait_phase(GANG, "Running", attempt=1)
    if holds:
        arena.wait_status(GANG, "its launchers hold", lambda s: s.get("holds"))
    for attempt, (paths, lost) in enumerate([(PATHS, 2), (older, 1), (PATHS, 2)], start=2):
        changes_nothing(arena, paths)
        before = uids(arena)
        arena.rest.delete(arena.path("pods", f"{GANG}-{lost}"), grace=0)
        status = arena.wait_phase(GANG, "Running", attempt=attempt)
        assert status["restarts"]["total"] == attempt - 1
        assert status["restarts"]["disruptions"] <= attempt - 1
        _, after = settled(arena)
        new = {name for name, uid in after.items() if before[name] != uid}
        assert new == ({f"{GANG}-{lost}"} if holds else before.keys())
    changes_nothing(arena, older)
    arena.succeed(GANG)
    take_over(arena, PATHS)
    assert arena.quiet_resyncs(2) == [], "an end is final, whoever wrote it"
    assert arena.status(GANG)["restarts"]["total"] == 3


@pytest.mark.tier("all")
@pytest.mark.parametrize("upgrade", [True, False])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.fault("O8")
def test_a_restart_that_one_has_begun_the_other_ends(
    arena, older, port, monkeypatch, upgrade, holds
):
    """The first is killed as its first new pod is stored: nothing is counted or made twice."""
    monkeypatch.setattr(Launcher, "holds", holds)
    first, second = (older, PATHS) if upgrade else (PATHS, older)
    take_over(arena, first)
    arena.apply(GANG, metrics={"port": port})
    arena.wait_phase(GANG, "Running", attempt=1)
    if holds:
        arena.wait_status(GANG, "its launchers hold", lambda s: s.get("holds"))
    _, before = settled(arena)
    dies = arena.operators[-1]
    arena.proxy.kill = dies.kill
    arena.proxy.faults = [Fault("kill-commit", creates_a_pod)]
    arena.kubelet.finish(f"{GANG}-1", 1, "boom")
    dies.wait()
    assert arena.status(GANG)["restarts"]["total"] == 1, "its intent is stored"
    take_over(arena, second)
    arena.wait_phase(GANG, "Running", attempt=2)
    found, after = settled(arena)
    assert (found["restarts"]["total"], found["restarts"]["charged"]) == (1, 1)
    assert [one["replica"] for one in found["losses"]] == [1]
    new = {name for name, uid in after.items() if before[name] != uid}
    assert new == ({f"{GANG}-1"} if holds else before.keys())
    arena.succeed(GANG)
