"""A gang's life against a real API server: created, restarted, ended, deleted."""

import time
from collections import Counter

import pytest

from api.roles import deciding
from support.proxy import Call
from support.rest import eventually


def test_a_gang_is_created_runs_and_succeeds(stage, gang):
    job = stage.apply(gang)
    uid = job["metadata"]["uid"]
    status = stage.wait_phase(gang, "Running")
    assert (status["attempt"], status["ready"]) == (1, "3/3")
    pods = stage.kubelet.pods(gang)
    assert [pod["metadata"]["name"] for pod in pods] == [f"{gang}-{n}" for n in range(3)]
    for replica, pod in enumerate(pods):
        labels = pod["metadata"]["labels"]
        assert labels["ddpjob.dev/job-uid"] == uid
        assert labels["ddpjob.dev/attempt"] == "1"
        assert labels["ddpjob.dev/replica"] == str(replica)
        (owner,) = pod["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)
    service = stage.rest.get(stage.path("services", gang))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    policies = stage.path("networkpolicies", gang, "/apis/networking.k8s.io/v1")
    assert stage.rest.get(policies)["metadata"]["ownerReferences"][0]["uid"] == uid
    assert stage.quiet_resyncs() == [], "a running gang costs no write"
    status = stage.succeed(gang)
    assert (status["succeededReplicas"], status["restarts"]["total"]) == ("0-2", 0)
    assert stage.condition(gang, "Complete")["status"] == "True"
    assert stage.quiet_resyncs() == [], "a finished gang costs no write"
    code, text = stage.operators[0].probe("/metrics")
    assert code == 200
    of = f'namespace="{stage.namespace}"'
    assert f'ddpjob_jobs{{{of},phase="Succeeded"}} 1.0' in text
    assert f'ddpjob_finished_total{{{of},result="Succeeded"}} 1.0' in text
    assert "ddpjob_leader 1.0" in text
    assert stage.operators[0].probe("/healthz")[0] == 200


@pytest.mark.fault("N10")
def test_a_restart_keeps_the_order_of_writes(stage, gang):
    stage.apply(gang)
    stage.wait_phase(gang, "Running")
    eventually("the count of ready pods is stored", lambda: stage.quiet_resyncs(1) == [])
    stage.proxy.clear()
    since = time.monotonic()
    stage.kubelet.finish(f"{gang}-1", 1, "Traceback: boom")
    status = stage.wait_phase(gang, "Running", attempt=2)
    assert status["restarts"]["total"] == status["restarts"]["charged"] == 1
    loss = status["lastFailure"]
    assert (loss["replica"], loss["exitCode"], loss["node"]) == (1, 1, stage.kubelet.node)
    assert loss["message"] == "Traceback: boom"
    calls = stage.proxy.calls
    kinds = [kind for kind in map(step, calls) if kind]
    assert kinds[0] == "intent", kinds
    barrier = kinds.index("barrier")
    assert kinds[1:4] == ["delete"] * 3
    assert "delete" not in kinds[barrier:], kinds
    assert [kind for kind in kinds[barrier:] if kind == "create"] == ["create"] * 3
    assert "create" not in kinds[:barrier]
    writes = stage.proxy.writes()
    took = time.monotonic() - since
    decided = deciding(writes, "status-running-1", took)
    assert len(decided) <= 3 + 2 * 3, [call.target for call in writes]
    assert all(uid_guarded(call) for call in writes if call.method == "DELETE")


def step(call: Call) -> str:
    """The role of a call in a restart."""
    if call.method == "PUT" and call.path.endswith("/status"):
        return "intent"
    if call.method == "DELETE" and "/pods/" in call.path:
        return "delete"
    if call.method == "POST" and call.path.endswith("/pods"):
        return "create"
    quorum = "resourceVersion" not in call.query and "watch" not in call.query
    if call.method == "GET" and "job-uid%3D" in call.query and quorum:
        return "barrier"
    return ""


def uid_guarded(call: Call) -> bool:
    return bool(call.body and call.body["preconditions"]["uid"])


def test_a_deleted_job_leaves_nothing(stage, gang):
    stage.apply(gang)
    stage.wait_phase(gang, "Running")
    stage.rest.delete(stage.job_path(gang))

    def left() -> list[str]:
        plurals = {
            "pods": "/api/v1",
            "services": "/api/v1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
        }
        return [
            str(obj["metadata"]["name"])
            for plural, group in plurals.items()
            for obj in stage.rest.items(stage.path(plural, group=group))
        ]

    eventually("the garbage collector has removed everything", lambda: not left())
    stage.apply(gang, replicas=2)
    stage.wait_phase(gang, "Running", attempt=1)
    assert Counter(attempt for _, attempt in stage.attempts(gang)) == {"1": 2}
