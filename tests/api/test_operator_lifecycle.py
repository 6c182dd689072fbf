"""A gang's life against a real API server: created, ended, deleted."""

import re
from collections import Counter

import pytest

from support.rest import Object, eventually


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


@pytest.mark.fault("O3")
def test_a_job_whose_deletion_no_watch_told_is_forgotten(stage, gang):
    stage.apply(gang)
    stage.wait_phase(gang, "Running")
    stage.wait_status(gang, "all ready", lambda s: s["replicas"]["ready"] == 3)

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
