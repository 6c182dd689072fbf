"""One real control plane for all API tests of a run: etcd, API server, controllers; no nodes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.plans import everything, plan_of, sample
from support import arena as support
from support import cluster, policy, tiers
from support.arena import OPEN, Arena
from support.sharing import Shared


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the plans a sample, the gate's less than others', unless `make soak` or -k wants more."""
    if config.option.keyword or any("::" in one for one in config.args):
        return
    share = os.environ.get("DDPJOB_SOAK", "")
    every = everything()
    if share:
        number, of = map(int, share.split("/"))
        chosen = {plan.id for plan in every[number - 1 :: of]}
    else:
        only = config.getoption("--tier") == tiers.GATE
        chosen = {plan.id for plan in sample(every, kinds_only=only)}
    left = [item for item in items if (plan := plan_of(item)) and plan.id not in chosen]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


@pytest.fixture(scope="session")
def control_plane(shared: Shared) -> cluster.Cluster:
    """A control plane with definition and policy; use a namespace of your own in it."""
    # Of this run: what another one has left, or makes beside it, is in nobody's way.
    run = shared.once("run", lambda: secrets.token_hex(3))
    return cluster.shared(shared, f"t-api-{run}", bound)


def bound(name: str) -> cluster.Cluster:
    """A control plane whose policy binds the operator's account, as an install has it."""
    plane = cluster.plane_up(name)
    policy.bind(plane)
    return plane


@pytest.fixture(autouse=True)
def invariants_hold() -> Iterator[None]:
    """What the store tells of a test is held against the invariants, whatever the test is about."""
    yield
    for stage in OPEN:
        stage.verify()


@pytest.fixture(scope="module")
def stage(
    control_plane: cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    """A namespace with an operator that leads, for all tests of a file."""
    with support.arena(control_plane.kubeconfig, tmp_path_factory.mktemp("stage")) as found:
        found.start_operator()
        yield found


@pytest.fixture
def arena(control_plane: cluster.Cluster, tmp_path: Path) -> Iterator[Arena]:
    """A namespace of the test's own, in which no operator is yet."""
    with support.arena(control_plane.kubeconfig, tmp_path) as found:
        yield found


@pytest.fixture
def gang(stage: Arena) -> Iterator[str]:
    """A name for the test's own DDPJob; it and all faults are removed afterwards."""
    name = f"gang-{secrets.token_hex(2)}"
    yield name
    stage.proxy.swallow = lambda _: False
    stage.proxy.faults = []
    stage.kubelet.keeps = lambda _: False
    stage.remove(name)
