"""Fence in a cluster whose control plane, network or operator fails together with a node."""

import asyncio

import pytest

from ddpjob_contract import crd
from model.cluster import Cluster
from model.story import World, job_body

FENCE = {
    "nodeLost": {"policy": "Fence", "afterSeconds": 1},
    "snapshot": {"path": "/snapshots", "volume": {"persistentVolumeClaim": {"claimName": "x"}}},
}


def running(loop: asyncio.AbstractEventLoop, nodes: int) -> World:
    cluster = Cluster(nodes=tuple(f"node-{n}" for n in range(nodes)))
    world = World(loop, fate=lambda *_: None, cluster=cluster)
    world.cluster.create(crd.PLURAL, job_body(**FENCE))
    assert world.run(lambda: world.phase() == "Running")
    return world


def attempt(world: World) -> object:
    return world.cluster.status("job").get("attempt")


def why(world: World) -> object:
    return world.cluster.status("job").get("reason")


def test_an_operator_that_starts_as_nodes_come_back_gives_none_up(loop):
    """All were silent for ten minutes, the operator too; other kubelets are back before it."""
    world = running(loop, 3)
    for node in world.cluster.nodes:
        world.cluster.silence(node)
    world.sleep(600)
    slowest = world.cluster.pods()[0]["spec"]["nodeName"]
    for node in world.cluster.nodes:
        if node != slowest:
            world.cluster.hear_again(node)
    world.restart(world.operator)
    for _ in range(2):
        while world.tick():
            pass
        assert attempt(world) == 1
        world.sleep(15)
    world.cluster.heal_nodes()
    world.run(lambda: False, 300)
    assert attempt(world) == 1


@pytest.mark.parametrize(("silent", "given_up"), [(2, True), (3, False), (5, False)])
def test_fence_waits_when_most_nodes_fall_silent_at_once(loop, silent, given_up):
    world = running(loop, 5)
    used = sorted({pod["spec"]["nodeName"] for pod in world.cluster.pods()})
    others = [node for node in world.cluster.nodes if node not in used]
    for node in [*used[:1], *others, *used[1:]][:silent]:
        world.cluster.silence(node)
    for pod in world.cluster.pods():
        if given_up and not world.cluster.hears(pod):
            world.cluster.disrupt(pod, "DeletionByTaintManager")
    world.run(lambda: False, 600)
    assert (attempt(world) == 2) is given_up
    if given_up:
        return
    assert why(world) == "NodesNotReady"
    world.cluster.hear_again(max(world.cluster.silent))
    world.cluster.heal_nodes()
    world.run(lambda: False, 120)
    assert (attempt(world), why(world)) == (1, None)


def test_two_operators_with_other_views_write_of_a_stall_at_a_slow_pace(loop):
    world = World(loop, fate=lambda *_: None)
    world.cluster.create(crd.PLURAL, job_body())
    assert world.run(lambda: world.phase() == "Running")
    world.state.deposed = True
    world.start_operator()
    world.freeze(world.operators[0], plurals=("nodes",))
    world.cluster.silence(world.cluster.pods()[0]["spec"]["nodeName"])
    before = len(world.cluster.history)
    world.run(lambda: False, 60)
    writes = [w for w in world.cluster.history[before:] if w.plural == crd.PLURAL]
    assert 10 < len(writes) <= 62, "each tells what it sees, every other second"
