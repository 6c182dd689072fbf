"""A node is drained, or has no room for a whole gang: it goes on elsewhere, uncharged."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster import wait_for
from support.patience import WITHIN
from support.site import STEPS, Site, digits, job

pytestmark = pytest.mark.tier("all")

URGENT = "urgent"


@pytest.mark.fault("N4")
def test_a_drained_node_is_left(site, finished):
    name = "drained"
    site.apply(digits(name, steps=STEPS, slow=1, every=5))
    site.wait_running(name, 1, snapshot_after=0)
    node = site.pods(name)[f"{name}-0"]["spec"]["nodeName"]
    selector = f"--pod-selector=ddpjob.dev/job-name={name}"
    words = ("drain", node, "--force", "--delete-emptydir-data", "--ignore-daemonsets", selector)
    try:
        site.cluster.kubectl(*words, WITHIN, check=True)
        after = site.wait_running(name, 2)
        assert node not in site.nodes(name)
    finally:
        site.cluster.kubectl("uncordon", node, check=True)
    assert after["lastFailure"]["class"] == "Disruption", after["failures"]
    assert after["restarts"]["charged"] == 0
    finished(name)
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
def test_a_preempted_gang_gives_all_back_and_comes_again(site, finished, urgent):
    """Each pod asks for 0.4 of a node; who is urgent for 0.7: then there is room for two pods.

    The deadline is short only while there is no room: a start that is slow would be charged.
    """
    name = "preempted"
    body = digits(name, steps=STEPS, slow=1, every=5, restart={"replaceSeconds": 10})
    request_cpu(site, body["spec"]["template"]["spec"]["containers"][0], 0.4)
    site.apply(body)
    site.wait_running(name, 1, snapshot_after=0)
    site.apply(intruder(site))
    failure = wait_for(lambda: site.status(name).get("lastFailure"), f"{name} to lose a pod")
    assert (failure["class"], failure["reason"]) == ("Disruption", "PreemptionByScheduler")
    change(site, name, startupDeadlineSeconds=10)
    site.wait_condition(name, "Stalled", "Unschedulable")
    site.wait_phase(name, "Pending")
    wait_for(lambda: not site.pods(name), f"{name} to give its pods back")
    change(site, name, startupDeadlineSeconds=600)
    site.kubectl("delete", "pod", "intruder", "--wait", check=True)
    site.wait_running(name, 3)
    after = finished(name)
    assert (after["restarts"]["total"], after["restarts"]["charged"]) == (1, 0), after
    site.delete(name)


# --- Inside ---------------------------------------------------------------------------------


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
    pod = job("intruder", ["sleep", "3600"])["spec"]["template"]
    pod["spec"] |= {"priorityClassName": URGENT, "terminationGracePeriodSeconds": 1}
    request_cpu(site, pod["spec"]["containers"][0], 0.7)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "intruder"}, **pod}
