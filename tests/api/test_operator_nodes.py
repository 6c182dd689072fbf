"""Machines that fall silent, as the API server tells of them: Node objects written by hand.

What the node controller would write (not ready, taints) the test writes itself, so that it need
not wait for its timeouts; pods that are deleted stay, as on a machine that does not answer.
"""

import contextlib
import http.server
import json
import secrets
from collections.abc import Iterator

import pytest

from support.arena import Arena
from support.invariants import SIGNAL
from support.pods import serving
from support.proxy import Call, Fault
from support.rest import Object, RestError

SNAPSHOT = {"path": "/snapshots", "volume": {"emptyDir": {}}}
FENCE = {"snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence", "afterSeconds": 1}}


class Machine:
    """A Node that the test speaks for, and the pods that it binds there."""

    def __init__(self, stage: Arena, name: str) -> None:
        self.stage, self.name, self.path = stage, name, f"/api/v1/nodes/{name}"
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        stage.rest.post("/api/v1/nodes", body)
        self.ready("True")

    def ready(self, status: str, **others: str) -> None:
        conditions = [
            {"type": type_, "status": value, "reason": "Test", "message": ""}
            for type_, value in {"Ready": status, **others}.items()
        ]
        self.stage.rest.merge(f"{self.path}/status", {"status": {"conditions": conditions}})

    def delete(self) -> None:
        with contextlib.suppress(RestError):
            self.stage.rest.delete(self.path)


@pytest.fixture
def machine(stage: Arena) -> Iterator[Machine]:
    """All pods that are created meanwhile come there."""
    made = Machine(stage, f"lost-{secrets.token_hex(2)}")
    stage.kubelet.node = made.name
    yield made
    stage.kubelet.node = stage.kubelet.own
    made.delete()


def silent(stage: Arena, machine: Machine, gang: str, **spec: object) -> None:
    """A gang on the machine, whose pods from now on never end; new ones go elsewhere."""
    stage.apply(gang, **spec)
    stage.wait_phase(gang, "Running")
    stage.kubelet.node = stage.kubelet.own
    stage.kubelet.keeps = lambda pod: pod["spec"].get("nodeName") == machine.name


def shown(event: Object, machine: Machine, ready: str) -> bool:
    """Does the watch tell that the machine's Ready is so?"""
    obj = event["object"]
    found = [c["status"] for c in (obj.get("status") or {}).get("conditions") or ()]
    return bool(obj["metadata"].get("name") == machine.name and found == [ready])


def lists_nodes(call: Call) -> bool:
    return call.path == "/api/v1/nodes" and call.method == "GET" and not call.watches


@pytest.mark.fault("N6")
def test_fence_deletes_by_force_and_the_gang_runs_elsewhere(stage, machine, gang):
    silent(stage, machine, gang, **FENCE)
    before = {p["metadata"]["uid"] for p in stage.kubelet.pods(gang)}
    stage.proxy.clear()

    def hears_of_it(event: Object) -> bool:
        """From then on no list of the nodes is a quorum's word: Fence has to ask for one.

        Not before: an operator whose list was refused is blind.
        """
        if shown(event, machine, "Unknown"):
            stage.proxy.faults = [Fault("answer", lists_nodes, times=10_000)]
        return False

    stage.proxy.swallow = hears_of_it
    machine.ready("Unknown")
    # A new operator counts 20 s at least.
    status = stage.wait_phase(gang, "Running", attempt=2)
    failure = status["lastFailure"]
    assert (failure["reason"], failure["class"]) == ("NodeLost", "Infrastructure")
    assert (failure["node"], status["restarts"]["charged"]) == (machine.name, 0)
    pods = stage.kubelet.pods(gang)
    assert not before & {p["metadata"]["uid"] for p in pods}
    assert {p["spec"]["nodeName"] for p in pods} == {f"hand-{stage.namespace}"}
    deletes = [c for c in stage.proxy.writes() if c.method == "DELETE"]
    assert [c.code for c in deletes] == [200] * 3, "once each, no way round"
    reads = [c for c in stage.proxy.calls if c.path == machine.path]
    assert reads, "a quorum has confirmed it"


class Launcher(http.server.BaseHTTPRequestHandler):
    """Answers GET /state as the launcher of replica 0 of a gang that holds."""

    step = 1

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        state = {"attempt": 1, "holds": True, "step": self.step, "snapshotStep": self.step - 1}
        self.wfile.write(json.dumps({"version": 1, **state}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.fault("N20")
def test_a_node_that_is_about_to_go_is_left_before_it_fails(arena):
    arena.start_operator("--node-signals", json.dumps({"conditions": [SIGNAL]}))
    with contextlib.ExitStack() as left:
        machine = Machine(arena, f"going-{secrets.token_hex(2)}")
        left.callback(machine.delete)
        port = left.enter_context(serving(arena.kubelet, Launcher))
        arena.apply("gang", metrics={"port": port})
        arena.wait_status("gang", "its launchers hold", lambda s: s.get("holds"))
        arena.kubelet.node = machine.name
        arena.kubelet.finish("gang-1", 1)
        arena.wait_phase("gang", "Running", attempt=2)
        arena.kubelet.node = arena.kubelet.own
        Launcher.step = 9
        arena.wait_status("gang", "it has progressed", lambda s: not s["restarts"]["charged"])
        before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in arena.kubelet.pods("gang")}
        arena.proxy.clear()
        machine.ready("True", **{SIGNAL: "True"})
        status = arena.wait_phase("gang", "Running", attempt=3)
        loss = status["lastFailure"]
        assert (loss["class"], loss["reason"]) == ("Disruption", "HandedOver")
        assert (loss["node"], status["births"]) == (machine.name, "1:3")
        assert status["avoidedNodes"] == [machine.name]
        pods = arena.kubelet.pods("gang")
        new = [p for p in pods if before[p["metadata"]["name"]] != p["metadata"]["uid"]]
        assert [p["metadata"]["name"] for p in new] == ["gang-1"]
        deletes = [c for c in arena.proxy.writes() if c.method == "DELETE"]
        assert [c.code for c in deletes] == [200], "one pod, once"
        reads = [c for c in arena.proxy.calls if c.path == machine.path]
        assert reads, "a quorum has confirmed it"
        assert arena.quiet_resyncs() == []
