"""What a user is told: failures, stalls and refusals."""

import pytest

from support.site import job, trainer


@pytest.mark.fault("N1")
def test_max_restarts_is_exact_and_the_cause_is_told(site):
    name, limit = "max-restarts", 1  # others: test_plan_restart.py
    script = 'echo "the data set is gone"; [ $DDPJOB_REPLICA = 1 ] && exit 3; sleep 300'
    restart = {"maxRestarts": limit, "backoff": {"maxSeconds": 1}}
    body = job(name, ["sh", "-c", script], restart=restart)
    # The end would wait for word of the nodes of those that sleep, but for this one that has told.
    body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node1"}
    site.apply(body)
    status = site.wait_phase(name, "Failed")
    assert (status["attempt"], status["restarts"]["total"]) == (limit + 1, limit)
    failure = status["lastFailure"]
    assert (failure["replica"], failure["exitCode"], failure["class"]) == (1, 3, "User")
    assert failure["node"] in ("node1", "node2")
    assert "the data set is gone" in failure["message"]
    assert site.condition(name, "Failed")["reason"] == "MaxRestartsExceeded"
    shown = site.describe(name)
    assert "MaxRestartsExceeded" in shown
    assert "exit code 3" in shown
    site.delete(name)


def test_a_signal_is_told_with_the_last_lines_of_the_log(site):
    name = "signalled"
    code = "import os; print('last words', flush=True); os.kill(os.getpid(), 11)"
    script = ["ddpjob-trainer", "run", "python3", "-c", code]
    site.apply(job(name, script, restart={"maxRestarts": 0}))
    failure = site.wait_phase(name, "Failed")["lastFailure"]
    assert (failure["exitCode"], failure["signal"]) == (139, 11)
    assert "last words" in failure["message"]
    site.delete(name)


@pytest.mark.fault("N8")
def test_a_wrong_image_is_told_and_when_it_is_mended_the_job_runs(site):
    name = "wrong-image"
    obj = job(name, ["true"])
    right, trainer(obj)["image"] = trainer(obj)["image"], "ddpjob/no-such-image:1"
    site.apply(obj)
    told = site.wait_condition(name, "Stalled", "ImagePullBackOff")
    assert "ddpjob/no-such-image:1" in told
    assert "ImagePullBackOff" in site.kubectl("get", "ddpjob", name).stdout
    trainer(obj)["image"] = right
    obj["spec"]["suspend"] = True  # a template may change only then
    site.apply(obj)
    site.wait_phase(name, "Suspended")
    obj["spec"]["suspend"] = False
    site.apply(obj)
    after = site.wait_phase(name, "Succeeded")
    assert after["restarts"]["total"] == 0
    site.delete(name)


@pytest.mark.fault("N8")
def test_a_missing_claim_is_told(site):
    claim = {"persistentVolumeClaim": {"claimName": "no-such-claim"}}
    site.apply(job("no-claim", ["true"], snapshot={"path": "/snapshots", "volume": claim}))
    assert "no-such-claim" in site.wait_condition("no-claim", "Stalled", "Unschedulable")
    site.delete("no-claim")


@pytest.mark.tier("all")
@pytest.mark.fault("N8")
def test_a_volume_that_cannot_be_mounted_is_told(site):
    obj = job("no-config", ["true"])
    obj["spec"]["template"]["spec"]["volumes"] = [{"name": "c", "configMap": {"name": "absent"}}]
    trainer(obj)["volumeMounts"] = [{"name": "c", "mountPath": "/c"}]  # else nobody waits for it
    site.apply(obj)
    told = site.wait_condition("no-config", "Stalled", "ContainerCreating")
    assert "kubectl get events" in told
    site.delete("no-config")
