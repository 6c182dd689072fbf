"""Gangs that Kubernetes places whole or not at all, on real nodes with room for eight pods' slots.

The cluster has the feature gates on; each node has four slots. Most gangs only hold
their slots: what they train is of no matter to the scheduler.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import cluster
from support import site as support
from support.cluster import CHECKOUT, wait_for
from support.sharing import Shared
from support.site import STEPS, Site, digits, job, trainer

pytestmark = pytest.mark.tier("all")

NAME = f"gangs-{CHECKOUT}"
SLOT = "example.com/slot"
SLOTS = 4
HIGH = "high"
GROUPS = "/apis/scheduling.k8s.io/v1alpha2/namespaces/{}/podgroups"
#: Ends at SIGTERM, as PID 1 does only if asked to.
HOLD = ["sh", "-c", "trap 'exit 143' TERM; sleep 100000 & wait"]


@pytest.fixture(scope="module")
def site(shared: Shared) -> Iterator[Site]:
    def make(name: str) -> cluster.Cluster:
        return support.ready(name, "--gang-scheduling")

    plane = cluster.shared(shared, NAME, make)
    for number in (1, 2):
        node = f"node{number}"
        room = json.dumps({"status": {"capacity": {SLOT: str(SLOTS)}}})
        patch = ("patch", "node", node, "--subresource=status", "--type=merge", "-p", room)
        plane.kubectl(*patch, check=True)
    made = support.namespace(plane)
    made.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": HIGH},
            "value": 1000,
        }
    )
    yield made
    cluster.down(NAME)


@pytest.fixture
def gangs(site: Site) -> Iterator[Callable[..., str]]:
    """Apply a gang of so many pods, each with so many slots; all go at the end of the test."""
    names: list[str] = []

    def apply(name: str, replicas: int, slots: int, *, command: Any = HOLD, **spec: Any) -> str:
        body = job(name, command, replicas=replicas, **spec)
        return apply_body(body, slots)

    def apply_body(body: dict[str, Any], slots: int) -> str:
        trainer(body)["resources"] = {"limits": {SLOT: str(slots)}}
        site.apply(body)
        names.append(body["metadata"]["name"])
        return names[-1]

    apply.body = apply_body  # type: ignore[attr-defined]
    yield apply
    for name in names:
        site.kubectl("delete", "ddpjob", name, "--wait=false", "--ignore-not-found", check=True)
    for name in names:
        wait_for(lambda name=name: not site.pods(name), f"pods of {name} to go")
    wait_for(lambda: not groups(site), "PodGroups to go with their jobs")


def groups(site: Site) -> dict[str, dict[str, Any]]:
    found = site.cluster.get(GROUPS.format(site.namespace))["items"]
    return {one["metadata"]["name"]: one for one in found}


def placed(site: Site, name: str) -> list[str]:
    """The nodes of its pods that have one."""
    nodes = (pod["spec"].get("nodeName") for pod in site.pods(name).values())
    return [node for node in nodes if node]


def waits(site: Site, name: str) -> str:
    """Wait until it says that it has no room; return its words. Nothing of it has a node."""
    message = site.wait_condition(name, "Stalled", "Unschedulable")
    assert placed(site, name) == []
    return message


def test_of_two_gangs_that_fit_only_alone_one_runs_and_one_holds_nothing(site, gangs):
    names = {gangs("left", 3, 2), gangs("right", 3, 2)}

    def runs() -> str | None:
        return next((name for name in names if site.status(name).get("phase") == "Running"), None)

    first = wait_for(runs, "one of two gangs to run")
    (second,) = names - {first}
    assert "Insufficient" in waits(site, second)
    assert len(groups(site)) == 2
    assert site.status(second)["phase"] == "Starting"
    site.delete(first)
    after = site.wait_phase(second, "Running")
    assert (after["attempt"], after["restarts"]["total"]) == (1, 0)
    assert after["timings"]["placedAt"] >= after["timings"]["attemptStartedAt"]


def test_a_higher_priority_takes_a_whole_gangs_room_until_it_comes_back(site, gangs):
    low = gangs("low", 3, 2)
    site.wait_phase(low, "Running")
    high = gangs("urgent", 3, 2, scheduling={"priorityClassName": HIGH})
    site.wait_phase(high, "Running")
    waits(site, low)
    status = site.status(low)
    assert (status["attempt"], status["restarts"]["charged"]) == (2, 0)
    assert status["lastFailure"]["reason"] == "PreemptionByScheduler"
    assert set(groups(site)) == {status["podGroup"], site.status(high)["podGroup"]}
    site.delete(high)
    assert site.wait_phase(low, "Running")["attempt"] == 2


def test_a_lost_pod_comes_back_to_its_place_while_others_wait_for_room(site, gangs):
    name = "full"
    gangs.body(digits(name, steps=STEPS, slow=1, every=5), 2)  # type: ignore[attr-defined]
    rest = gangs("rest", 1, 2)
    site.wait_phase(rest, "Running")
    site.wait_running(name, 1, snapshot_after=0)
    waits(site, gangs("waiting", 3, 2))
    before = site.uids(name)
    site.kubectl("delete", "pod", f"{name}-1", "--wait=false", check=True)
    after = site.wait_running(name, 2)
    kept = [pod for pod, uid in site.uids(name).items() if before[pod] == uid]
    assert kept == [f"{name}-0", f"{name}-2"]
    assert (after["membersSince"], after["restarts"]["charged"]) == (1, 0)
    assert placed(site, "waiting") == []
    site.hurry(name)
    site.wait_phase(name, "Succeeded")
    wait_for(lambda: after["podGroup"] not in groups(site), "the PodGroup to go at the job's end")
    site.wait_phase("waiting", "Running")


def test_a_preempted_training_ends_in_the_same_weights(site, gangs):
    plain = digits("undisturbed", steps=STEPS, step_seconds=0)
    gangs.body(plain, 2)  # type: ignore[attr-defined]
    site.wait_phase("undisturbed", "Succeeded")
    wanted = site.result("undisturbed")
    name = "preempted"
    gangs.body(digits(name, steps=STEPS, slow=1, every=5), 2)  # type: ignore[attr-defined]
    site.wait_running(name, 1, snapshot_after=0)
    high = gangs("urgent", 3, 2, scheduling={"priorityClassName": HIGH})
    site.wait_phase(high, "Running")
    site.delete(high)
    after = site.wait_running(name, 2)
    assert after["restarts"]["charged"] == 0
    site.resumed_from(name, at_least=1)
    site.hurry(name)
    site.wait_phase(name, "Succeeded")
    assert site.result(name) == wanted
