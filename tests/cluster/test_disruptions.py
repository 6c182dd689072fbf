"""What a cluster does to pods, and the control plane to itself: the gang goes on, uncharged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import wait_for
from support.patience import WITHIN
from support.plane import Plane
from support.site import Site, digits, job

Record = Callable[[str, float], None]  # pytest's record_property
Undisturbed = Callable[[int], dict[str, str]]
STEPS = 150  # as other tests have, so that one undisturbed run serves all
URGENT = "urgent"


@pytest.mark.fault("N4")
def test_an_evicted_pod_is_a_disruption_and_loses_no_step(
    site: Site, undisturbed: Undisturbed, record_property: Record
) -> None:
    name = "evicted"
    # No snapshot but that of SIGTERM, for which there is time enough.
    body = digits(name, steps=STEPS, slow=1, every=1000)
    body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 600
    site.apply(body)
    reached = site.wait_running(name, 1, step=5)["progress"]["step"]
    evict(site, f"{name}-1")
    after = site.wait_running(name, 2)
    record_property("recovery_seconds", after["timings"]["lastRecoverySeconds"])
    failure, restarts = after["lastFailure"], after["restarts"]
    assert (failure["class"], failure["reason"]) == ("Disruption", "EvictionByEvictionAPI")
    assert (restarts["total"], restarts["charged"]) == (1, 0)
    assert site.resumed_from(name) >= reached
    site.hurry(name)
    site.wait_phase(name, "Succeeded")
    assert site.result(name) == undisturbed(STEPS)
    site.delete(name)


@pytest.mark.fault("N4")
def test_a_drained_node_is_left(site: Site, undisturbed: Undisturbed) -> None:
    name = "drained"
    site.apply(digits(name, steps=STEPS, slow=1, every=5))
    site.wait_running(name, 1, snapshot_after=0)
    node = site.pods(name)[f"{name}-0"]["spec"]["nodeName"]
    selector = f"--pod-selector=ddpjob.dev/job-name={name}"
    words = ("drain", node, "--force", "--delete-emptydir-data", "--ignore-daemonsets", selector)
    try:
        site.cluster.kubectl(*words, WITHIN, check=True)
        after = site.wait_running(name, 2)
        assert node not in {pod["spec"]["nodeName"] for pod in site.pods(name).values()}
    finally:
        site.cluster.kubectl("uncordon", node, check=True)
    assert after["lastFailure"]["class"] == "Disruption", after["failures"]
    assert after["restarts"]["charged"] == 0
    site.hurry(name)
    site.wait_phase(name, "Succeeded")
    assert site.result(name) == undisturbed(STEPS)
    site.delete(name)


@pytest.fixture
def urgent(site: Site) -> Iterator[None]:
    """A PriorityClass above ours."""
    body = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": URGENT},
        "value": 1000,
    }
    site.apply(body)
    yield
    site.cluster.kubectl("delete", "priorityclass", URGENT)


@pytest.mark.fault("N4", "N9")
def test_a_preempted_gang_gives_all_back_and_comes_again(
    site: Site, undisturbed: Undisturbed, urgent: None
) -> None:
    """Each pod asks for 0.4 of a node; who is urgent for 0.7: then there is room for two pods.

    The deadline is short only while there is no room: a start that is slow would be charged.
    """
    name = "preempted"
    body = digits(name, steps=STEPS, slow=1, every=5)
    request_cpu(site, body["spec"]["template"]["spec"]["containers"][0], 0.4)
    site.apply(body)
    site.wait_running(name, 1, snapshot_after=0)
    site.apply(intruder(site))
    after = wait_for(lambda: lost_one(site, name), f"{name} to lose a pod")
    failure = after["lastFailure"]
    assert (failure["class"], failure["reason"]) == ("Disruption", "PreemptionByScheduler")
    change(site, name, startupDeadlineSeconds=10)
    wait_for(lambda: released(site, name), f"{name} to give its pods back")
    change(site, name, startupDeadlineSeconds=600)
    site.kubectl("delete", "pod", "intruder", "--wait", check=True)
    site.wait_running(name, 3)
    site.hurry(name)
    after = site.wait_phase(name, "Succeeded")
    assert (after["restarts"]["total"], after["restarts"]["charged"]) == (1, 0), after
    assert site.result(name) == undisturbed(STEPS)
    site.delete(name)


@pytest.mark.fault("N5")
def test_out_of_memory_is_told_as_such(site: Site) -> None:
    name = "greedy"
    hoard = "x = []\nwhile True: x.append(bytearray(10_000_000))"
    at_once = {"initialSeconds": 1, "maxSeconds": 1}
    body = job(name, ["python3", "-c", hoard], restart={"maxRestarts": 3, "backoff": at_once})
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"memory": "100Mi"}}
    site.apply(body)
    status = site.wait_phase(name, "Failed")
    # containerd may hear of a container's end before it hears why (1 in 72): not so each time.
    told = {(failure["class"], failure["reason"]) for failure in status["failures"]}
    assert ("OOM", "OOMKilled") in told, status["failures"]
    assert {class_ for class_, _ in told} <= {"OOM", "Killed"}, status["failures"]
    assert status["restarts"]["charged"] == 3, "exactly as often as maxRestarts allows"
    site.delete(name)


@pytest.mark.fault("N10")
def test_pods_that_end_slowly_are_waited_for(site: Site, undisturbed: Undisturbed) -> None:
    name = "slow"
    body = digits(name, steps=STEPS, slow=1, every=5)
    hook = {"preStop": {"exec": {"command": ["sleep", "12"]}}}
    body["spec"]["template"]["spec"]["containers"][0]["lifecycle"] = hook
    site.apply(body)
    site.wait_running(name, 1, snapshot_after=0)
    site.kubectl("delete", "pod", f"{name}-1", "--wait=false", check=True)

    def attempts() -> set[str]:
        labels = [pod["metadata"]["labels"] for pod in site.pods(name).values()]
        return {found["ddpjob.dev/attempt"] for found in labels}

    def came() -> bool | None:
        now = attempts()
        assert len(now) <= 1, f"pods of two attempts at once: {now}"
        return now == {"2"} or None

    wait_for(came, "the second attempt")
    site.hurry(name)
    site.wait_phase(name, "Succeeded")
    assert site.result(name) == undisturbed(STEPS)
    site.delete(name)


@pytest.mark.fault("A6", "O6")
def test_the_api_server_is_away_while_a_gang_trains(site: Site, undisturbed: Undisturbed) -> None:
    name = "unwatched"
    body = digits(name, steps=STEPS, slow=1, every=5)
    # On a busy machine a kubelet comes back late: that its node is then taken for lost, and its
    # pods evicted, those that are done and their logs as well, is another fault's test.
    taints = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    body["spec"]["template"]["spec"]["tolerations"] = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute"} for taint in taints
    ]
    site.apply(body)
    site.wait_running(name, 1, snapshot_after=0)
    volume = site.volume()
    plane = Plane(site.cluster)
    plane.kill("apiserver")
    try:
        reached = newest(volume, name)
        wait_for(lambda: newest(volume, name) >= reached + 20 or None, "20 steps more")
    finally:
        plane.repair()
    site.hurry(name)
    after = site.wait_phase(name, "Succeeded")
    restarts = after["restarts"]
    assert (after["attempt"], restarts["total"], restarts["inPlace"]) == (1, 0, 0), after
    assert site.result(name) == undisturbed(STEPS)
    site.delete(name)


# --- Inside ---------------------------------------------------------------------------------


def evict(site: Site, pod: str) -> None:
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": site.namespace},
    }
    path = f"/api/v1/namespaces/{site.namespace}/pods/{pod}/eviction"
    site.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body), check=True)


def change(site: Site, name: str, **spec: Any) -> None:
    patch = ("patch", "ddpjob", name, "--type=merge", "-p", json.dumps({"spec": spec}))
    site.kubectl(*patch, check=True)


def request_cpu(site: Site, container: dict[str, Any], share: float) -> None:
    """Ask for that share of a node's processors."""
    nodes = site.get("nodes")["items"]
    cores = {int(node["status"]["allocatable"]["cpu"]) for node in nodes}
    assert len(cores) == 1
    container["resources"] = {"requests": {"cpu": f"{int(1000 * share * cores.pop())}m"}}


def intruder(site: Site) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "ddpjob/trainer:0.1.0",
        "command": ["sleep", "3600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    request_cpu(site, container, 0.7)
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "intruder"},
        "spec": {
            "priorityClassName": URGENT,
            "terminationGracePeriodSeconds": 1,
            "securityContext": security,
            "containers": [container],
        },
    }


def lost_one(site: Site, name: str) -> dict[str, Any] | None:
    status = site.status(name)
    return status if status.get("lastFailure") else None


def released(site: Site, name: str) -> bool | None:
    stalled = site.condition(name, "Stalled")
    told = (stalled.get("status"), stalled.get("reason")) == ("True", "Unschedulable")
    return (told and site.status(name)["phase"] == "Pending" and not site.pods(name)) or None


def newest(volume: Path, name: str) -> int:
    manifests = (volume / name).glob("*/step-*.json")
    return max((int(path.stem.split("-")[1]) for path in manifests), default=0)
