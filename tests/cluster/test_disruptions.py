"""What a cluster does to a pod: the gang goes on, and pays only for what it did itself."""

import pytest

from support.site import STEPS, digits, job, trainer


@pytest.mark.fault("N4")
def test_an_evicted_pod_is_a_disruption_and_loses_no_step(site, finished):
    name = "evicted"
    # No snapshot but that of SIGTERM, for which there is time enough.
    body = digits(name, steps=STEPS, slow=1, every=1000)
    body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 600
    site.apply(body)
    reached = site.wait_running(name, 1, step=5)["progress"]["step"]
    site.evict(f"{name}-1")
    after = site.wait_running(name, 2)
    failure, restarts = after["lastFailure"], after["restarts"]
    assert (failure["class"], failure["reason"]) == ("Disruption", "EvictionByEvictionAPI")
    assert (restarts["total"], restarts["charged"]) == (1, 0)
    site.resumed_from(name, at_least=reached)
    finished(name)
    site.delete(name)


@pytest.mark.fault("N5")
def test_out_of_memory_is_told_as_such(site):
    name = "greedy"
    hoard = "x = []\nwhile True: x.append(bytearray(10_000_000))"
    at_once = {"initialSeconds": 1, "maxSeconds": 1}
    body = job(name, ["python3", "-c", hoard], restart={"maxRestarts": 3, "backoff": at_once})
    trainer(body)["resources"] = {"limits": {"memory": "100Mi"}}
    site.apply(body)
    status = site.wait_phase(name, "Failed")
    # containerd may hear of a container's end before it hears why (1 in 72): not so each time.
    told = {(failure["class"], failure["reason"]) for failure in status["failures"]}
    assert ("OOM", "OOMKilled") in told, status["failures"]
    assert {class_ for class_, _ in told} <= {"OOM", "Killed"}, status["failures"]
    assert status["restarts"]["charged"] == 3, "exactly as often as maxRestarts allows"
    site.delete(name)
