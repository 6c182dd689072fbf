"""Two real clusters for the whole level, with the chart installed by Helm.

The workers of a run share one, each with a namespace of its own. Tests in disruptive/ stop nodes,
operators and the API server: they have the other one, and one worker plays them all.
DDPJOB_KEEP_CLUSTER=1 leaves both up, which makes the next run start at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from devcluster import host
from support import cluster
from support import site as support
from support.chronicle import Chronicle
from support.cluster import CHECKOUT, wait_for
from support.rest import Rest
from support.sharing import Shared, disruptive


@pytest.fixture(scope="session", autouse=True)
def packages() -> None:
    """What a cluster's nodes need: some tests look at the machine before they make a cluster."""
    host.ensure_packages({**host.PACKAGES, **host.NODE_PACKAGES}, print)


@pytest.fixture(scope="session")
def sites(shared: Shared) -> Callable[[str], support.Site]:
    """This worker's namespace in a cluster of that name, both made when first asked for."""
    made: dict[str, support.Site] = {}
    keep = bool(os.environ.get("DDPJOB_KEEP_CLUSTER"))

    def found(name: str) -> support.Site:
        if name not in made:
            made[name] = support.namespace(cluster.shared(shared, name, support.ready, keep=keep))
        return made[name]

    return found


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, sites: Callable[[str], support.Site]) -> support.Site:
    """The cluster with the operator, and a namespace for this worker's tests."""
    own = "-d" if disruptive(request.node.nodeid) else ""
    return sites(f"t-{CHECKOUT}{own}")


@pytest.fixture(scope="module")
def chronicle(site: support.Site) -> Iterator[Chronicle]:
    """What the API server's watch tells of the tests' namespace."""
    with Chronicle(Rest(site.cluster.kubeconfig), site.namespace) as found:
        yield found


@pytest.fixture(autouse=True)
def invariants(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every write of every test is held against the invariants, and no pod outlives its job."""
    if "site" not in request.fixturenames:
        yield
        return
    chronicle: Chronicle = request.getfixturevalue("chronicle")
    yield
    wrong = chronicle.violations()

    def none_left() -> bool | None:
        wrong.extend(chronicle.violations())  # each is told once
        return True if wrong or not chronicle.orphans() else None

    wait_for(none_left, f"pods of jobs that are gone to go: {chronicle.orphans()}")
    assert wrong == []


@pytest.fixture(scope="module")
def finished(site: support.Site, shared: Shared) -> support.Finished:
    """Hold the weights of a disturbed job of the digits example to those of an undisturbed one."""

    def train() -> dict[str, str]:
        name = "undisturbed"
        site.apply(support.digits(name, steps=support.STEPS, step_seconds=0))
        status = site.wait_phase(name, "Succeeded")
        assert status["attempt"] == 1
        assert status["restarts"]["total"] == 0
        result = site.result(name)
        site.delete(name)
        return result

    def run(name: str) -> dict[str, Any]:
        site.hurry(name)
        status = site.wait_phase(name, "Succeeded")
        assert site.result(name) == shared.once("undisturbed", train)
        return status

    return run
