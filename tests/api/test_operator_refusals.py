"""What the API server may refuse: quota, a taken name, a pod's account."""

import re

import pytest
import yaml

from api.quotas import set_quota
from support.cluster import ROOT
from support.rest import Object, RestError, eventually
from support.tiers import some_in_gate


@pytest.mark.fault("A3", "N9")
def test_quota_releases_all_and_the_gang_comes_up_when_it_is_lifted(stage, gang):
    body: Object = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "2"}},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried"}}
    tried = {**pod, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    quota = set_quota(stage.rest, stage.namespace, body, (stage.path("pods"), tried))
    stage.apply(gang, restart={"backoff": {"maxSeconds": 5}})
    stalled = stage.wait_condition(gang, "Stalled", "QuotaExceeded")
    assert "exceeded quota" in stalled["message"]
    eventually("all pods are released", lambda: not stage.kubelet.pods(gang))
    stage.rest.delete(quota)
    status = stage.wait_phase(gang, "Running")
    assert status["restarts"]["charged"] == 0, "waiting for quota is never charged"
    assert stage.condition(gang, "Stalled")["status"] == "False"


@pytest.mark.parametrize("kind", some_in_gate(["Service", "Pod"], "Pod"))
@pytest.mark.fault("A2")
def test_a_foreign_object_of_that_name_is_not_touched(stage, gang, kind):
    plural, name = ("services", gang) if kind == "Service" else ("pods", f"{gang}-1")
    spec: Object = (
        {"ports": [{"port": 80}]}
        if kind == "Service"
        else {"schedulerName": "nobody", "containers": [{"name": "c", "image": "x"}]}
    )
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    foreign = stage.rest.post(stage.path(plural), body)
    stage.apply(gang)
    stalled = stage.wait_condition(gang, "Stalled", "NameConflict")
    assert f"{kind} {name}" in stalled["message"]
    kept = stage.rest.get(stage.path(plural, name))
    assert kept["metadata"]["uid"] == foreign["metadata"]["uid"]
    assert "deletionTimestamp" not in kept["metadata"]
    stage.rest.delete(stage.path(plural, name), grace=0)
    stage.wait_phase(gang, "Running")


def test_a_quota_of_jobs_refuses_one_too_many(stage, gang):
    """That of docs/guides/operations.md, with room for one."""
    text = (ROOT / "docs" / "guides" / "operations.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    quota: Object = yaml.safe_load(block)
    (kind,) = quota["spec"]["hard"]
    quota["spec"]["hard"][kind] = "1"
    tried = (stage.job_path(), stage.job(gang))
    path = set_quota(stage.rest, stage.namespace, quota, tried)
    stage.apply(gang)
    try:
        with pytest.raises(RestError) as refused:
            stage.apply(f"{gang}-b")
    finally:
        stage.rest.delete(path)
    assert refused.value.code == 403
    assert f"exceeded quota: ddpjobs, requested: {kind}=1, used: {kind}=1" in str(refused.value)
    stage.wait_phase(gang, "Running")
