"""How the operator starts: what it waits for and what it says meanwhile."""

import json
import secrets
import socket

import pytest

from support.proxy import Call, Fault
from support.rest import eventually
from support.tiers import some_in_gate


@pytest.mark.fault("A8")
def test_it_waits_for_the_api_server_and_says_so(arena):
    arena.proxy.faults = [Fault("lose-call", lambda call: True, times=10_000)]
    # It tries for the lease again when a fifth of it has passed.
    operator = arena.operator("--lease-seconds", "30").start()
    eventually("it says so", lambda: "no answer from the API server" in operator.log())
    assert operator.probe("/readyz")[0] == 503
    assert operator.probe("/healthz")[0] == 200, "a restart would not help"
    arena.proxy.faults = []
    operator.wait_ready()
    operator.wait_leading()


@pytest.mark.fault("A8")
def test_it_waits_for_the_crd_and_says_what_to_do(arena):
    absent = Fault("answer", lambda call: "ddpjob.dev" in call.path, times=10_000, code=404)
    arena.proxy.faults = [absent]
    operator = arena.operator("--resync-seconds", "2").start()
    eventually("it says so", lambda: "kubectl apply -f manifests/crd.yaml" in operator.log())
    assert operator.probe("/readyz")[0] == 503
    arena.proxy.faults = []
    operator.wait_ready()
    gang = f"gang-{secrets.token_hex(2)}"
    arena.apply(gang)
    arena.wait_phase(gang, "Running")


def test_the_watch_alone_is_enough(arena):
    operator = arena.operator("--resync-seconds", "3600").start()
    operator.wait_ready()
    operator.wait_leading()
    arena.apply("gang")
    arena.wait_phase("gang", "Running")
    arena.rest.merge(arena.job_path("gang"), {"spec": {"suspend": True}})
    arena.wait_phase("gang", "Suspended")
    # A namespace is told of from the first scrape on that finds a job there.
    told = lambda count: f'phase="Suspended"}} {count}' in operator.probe("/metrics")[1]  # noqa: E731
    eventually("its phase is told", lambda: told(1.0))
    arena.rest.delete(arena.job_path("gang"))
    eventually("its deletion is told", lambda: told(0.0))


def test_json_logs_are_json_line_by_line(arena):
    operator = arena.operator("--log-format", "json").start()
    operator.wait_ready()
    operator.wait_leading()  # one line more than the two that any start and end says
    operator.terminate()
    lines = [json.loads(line) for line in operator.log().splitlines()]
    assert len(lines) >= 3
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_a_taken_port_is_a_clear_error(arena):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        operator = arena.operator("--probe-port", str(taken.getsockname()[1])).start()
        assert operator.wait() == 1
    assert "cannot start" in operator.log()
    assert "Traceback" not in operator.log()


@pytest.mark.fault("A7")
@pytest.mark.parametrize("plural", some_in_gate(["ddpjobs", "pods"], "ddpjobs"))
def test_after_a_restored_etcd_the_next_process_takes_the_gang_as_it_is(arena, plural):
    """A list from the past, which shows nothing: none of it may be believed or acted on."""
    operator = arena.start_operator()
    arena.apply("gang")
    arena.wait_phase("gang", "Running")
    before = {pod["metadata"]["uid"] for pod in arena.kubelet.pods("gang")}

    def of_the_past(call: Call) -> bool:
        mine = call.agent.startswith("ddpjob") and "watch" not in call.query
        return mine and call.method == "GET" and call.path == path

    path = arena.job_path() if plural == "ddpjobs" else arena.path("pods")
    past = json.dumps({"metadata": {"resourceVersion": "1"}, "items": []})
    arena.proxy.faults = [Fault("answer", of_the_past, code=200, text=past)]
    arena.proxy.errors_next = [("/pods", 410)]  # so that the pods are listed, too
    arena.proxy.cut_watches()
    assert operator.wait() == 1
    assert "etcd was restored from a backup; starting again" in operator.log()
    assert "Traceback" not in operator.log()
    arena.proxy.clear()
    operator.start()
    operator.wait_ready()
    operator.wait_leading()
    assert arena.quiet_resyncs() == []
    assert {pod["metadata"]["uid"] for pod in arena.kubelet.pods("gang")} == before
    assert arena.status("gang")["attempt"] == 1
