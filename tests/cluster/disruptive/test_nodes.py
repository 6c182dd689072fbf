"""A machine is lost, with the gang and with the operator that leads; what lives on is shut out."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster import wait_for
from support.patience import WITHIN
from support.plane import processes_with
from support.site import STEPS, SYSTEM, Site, digits, job, newest_snapshot, spread

NODES = ("node1", "node2")
FENCE = {"policy": "Fence", "afterSeconds": 5}


@pytest.fixture
def machines(site: Site) -> Iterator[None]:
    """Both nodes and both operators are there, before and after."""
    whole(site)
    yield
    for node in NODES:
        with contextlib.suppress(AssertionError):  # it is off
            site.cluster.node("heal", node)
        site.cluster.node("start", node)
    whole(site)


def whole(site: Site) -> None:
    ready = ("wait", "--for=condition=Ready", WITHIN, *(f"node/{n}" for n in NODES))
    site.cluster.kubectl(*ready, check=True)
    rolled = ("rollout", "status", "deployment/ddpjob-operator", WITHIN)
    site.cluster.kubectl("-n", SYSTEM, *rolled, check=True)
    site.wait_leader()


def preferring(job: dict[str, Any], node: str) -> dict[str, Any]:
    """The job, whose pods go to that node as long as it takes any."""
    names = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    wish = {"weight": 100, "preference": {"matchExpressions": [names]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    job["spec"]["template"]["spec"]["affinity"] = affinity
    return job


@pytest.mark.fault("N6", "N7")
def test_a_gang_behind_a_partition_is_replaced_and_its_zombie_is_shut_out(site, finished, machines):
    name = "fenced"
    cut = next(node for node in NODES if node != site.leader()[1])
    job = digits(name, steps=STEPS, slow=6, every=2, nodeLost=FENCE)
    site.apply(preferring(job, cut))
    site.wait_running(name, 1, snapshot_after=0)
    assert site.nodes(name) == {cut}
    site.cluster.node("partition", cut)
    status = site.wait_running(name, 2)
    failure = status["lastFailure"]
    assert (failure["reason"], failure["node"]) == ("NodeLost", cut)
    assert (status["restarts"]["total"], status["restarts"]["charged"]) == (1, 0)
    assert site.nodes(name).isdisjoint({cut})
    behind = site.volume() / name / "00000001"
    zombie = newest_snapshot(behind)
    wait_for(lambda: newest_snapshot(behind) > zombie, "the zombie to commit beside the new gang")
    site.cluster.node("heal", cut)
    here = {"DDPJOB_NAMESPACE": site.namespace, "DDPJOB_NAME": name, "DDPJOB_ATTEMPT": "1"}
    wait_for(lambda: not processes_with(**here), "the zombie to be ended")
    after = finished(name)
    assert (after["attempt"], after["restarts"]["total"]) == (2, 1), after["failures"]
    site.delete(name)


@pytest.mark.tier("all")
@pytest.mark.fault("N6", "O5")
def test_a_node_dies_with_the_leading_operator_and_ranks_of_a_gang(site, finished, machines):
    name = "node-dies"
    pod, dead = site.leader()
    job = digits(name, steps=STEPS, slow=1, every=5, nodeLost=FENCE)
    site.apply(preferring(job, dead))
    site.wait_running(name, 1, snapshot_after=0)
    assert dead in site.nodes(name)
    site.cluster.node("stop", dead)
    status = site.wait_running(name, 2)
    assert status["restarts"]["charged"] == 0
    assert site.leader()[0] != pod
    assert dead not in site.nodes(name)
    after = finished(name)
    assert (after["attempt"], after["restarts"]["total"]) == (2, 1), after["failures"]
    site.delete(name)


@pytest.mark.tier("all")
@pytest.mark.fault("N6")
def test_the_survivors_of_a_lost_node_save_the_newest_step(site, finished, machines):
    """No other snapshot is made."""
    name = "node-rescue"
    site.apply(spread(digits(name, steps=STEPS, slow=3, every=1000, nodeLost=FENCE)))
    site.wait_running(name, 1, step=2)
    wait_for(lambda: site.status(name).get("holds"), f"{name} to be able to hold")
    hub = site.pods(name)[f"{name}-0"]["spec"]["nodeName"]
    dead = next(node for node in NODES if node != hub)
    reached = site.progress(name, "step")
    site.cluster.node("stop", dead)
    site.wait_running(name, 2)
    site.resumed_from(name, at_least=max(1, reached))
    assert finished(name)["restarts"]["charged"] == 0
    site.delete(name)


@pytest.mark.tier("all")
@pytest.mark.fault("N6")
def test_under_wait_the_job_says_what_ends_it_and_that_does(site, finished, machines):
    name = "waits"
    dead = next(node for node in NODES if node != site.leader()[1])
    site.apply(preferring(digits(name, steps=STEPS, slow=1, every=5), dead))
    site.wait_running(name, 1, snapshot_after=0)
    site.cluster.node("stop", dead)

    taint = f"{dead} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    assert f"kubectl taint node {taint}" in site.wait_condition(name, "Stalled", "NodeNotReady")
    site.cluster.kubectl("taint", "node", *taint.split(), check=True)
    try:
        site.wait_running(name, 2)
        finished(name)
    finally:
        key = "node.kubernetes.io/out-of-service:NoExecute-"
        site.cluster.kubectl("taint", "node", dead, key, check=True)
    site.delete(name)


@pytest.mark.tier("all")
@pytest.mark.fault("N14")
def test_peers_that_end_before_their_node_is_known_lost_fail_no_job(site, machines):
    """A program without our launcher: what it ends with says nothing of a lost peer."""
    name = "foreign"
    dead = next(node for node in NODES if node != site.leader()[1])
    script = "until [ -e /tmp/end ]; do sleep 0.2; done; exit 1"
    site.apply(spread(job(name, ["sh", "-c", script], replicas=2, restart={"maxRestarts": 0})))
    site.wait_phase(name, "Running")
    pods = site.pods(name).values()
    lives = next(p["metadata"]["name"] for p in pods if p["spec"]["nodeName"] != dead)
    site.cluster.node("stop", dead)
    touch = ("exec", lives, "--", "touch", "/tmp/end")

    def arrived() -> bool | None:
        # No check: what it brings about may kill it.
        came = site.kubectl(*touch).returncode == 0
        return True if came or site.status(name)["phase"] != "Running" else None

    wait_for(arrived, "the peer to be told to end")
    status = site.wait_phase(name, "Restarting")
    failure = status["lastFailure"]
    assert (failure["reason"], failure["node"]) == ("NodeLost", dead)
    assert (status["restarts"]["total"], status["restarts"]["charged"]) == (1, 0)
    site.cluster.node("start", dead)
    assert site.wait_phase(name, "Running")["attempt"] == 2
    site.delete(name)


@pytest.mark.tier("all")
@pytest.mark.fault("N12")
def test_a_node_reboots_under_a_gang(site, finished, machines):
    """Its power goes and comes back long before anybody calls it lost: the kubelet tells."""
    name = "rebooted"
    node = next(node for node in NODES if node != site.leader()[1])
    site.apply(preferring(digits(name, steps=STEPS, slow=1, every=5), node))
    before = site.wait_running(name, 1, snapshot_after=0)
    assert node in site.nodes(name)
    site.cluster.node("stop", node)
    site.cluster.node("start", node)
    after = site.wait_running(name, 2)
    assert after["lastFailure"]["node"] == node
    assert (after["restarts"]["total"], after["restarts"]["charged"]) == (1, 0), after["failures"]
    site.resumed_from(name, at_least=before["progress"]["snapshotStep"])
    finished(name)
    site.delete(name)
