"""One real two-node cluster for the whole level, with the chart installed by Helm.

DDPJOB_KEEP_CLUSTER=1 leaves it up, which makes the next run start at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from devcluster import host
from support import site as support
from support.chronicle import Chronicle
from support.cluster import CHECKOUT, wait_for

NAME = f"t-{CHECKOUT}"


@pytest.fixture(scope="session", autouse=True)
def packages() -> None:
    """What a cluster's nodes need: some tests look at the machine before they make a cluster."""
    host.ensure_packages({**host.PACKAGES, **host.NODE_PACKAGES}, print)


@pytest.fixture(scope="session")
def site() -> Iterator[support.Site]:
    """The cluster with the operator and an empty namespace."""
    with support.installed(NAME) as found:
        yield found


@pytest.fixture(scope="session")
def chronicle(site: support.Site) -> Iterator[Chronicle]:
    """What the API server's watch tells of the tests' namespace."""
    with Chronicle(site.cluster.kubeconfig, site.namespace) as found:
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


@pytest.fixture(scope="session")
def undisturbed(site: support.Site) -> Callable[[int], dict[str, str]]:
    """Results of the digits example that nothing disturbed, by number of steps."""
    known: dict[int, dict[str, str]] = {}

    def result(steps: int) -> dict[str, str]:
        if steps not in known:
            name = f"undisturbed-{steps}"
            site.apply(support.digits(name, steps=steps, step_seconds=0))
            status = site.wait_phase(name, "Succeeded")
            assert status["attempt"] == 1
            assert status["restarts"]["total"] == 0
            known[steps] = site.result(name)
            site.delete(name)
        return known[steps]

    return result
