"""Gangs on the host's network: two share their nodes, and are seen by the plugin.

The nodes of this cluster know their own names as little as a Debian machine does: gloo would listen
on the loopback.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster import wait_for
from support.plugin import Plugin
from support.site import Site, digits, spread

pytestmark = pytest.mark.tier("all")

NAMES = ("host-a", "host-b")


def on_host(name: str) -> dict[str, Any]:
    """A gang with a pod on each node."""
    obj = spread(digits(name, steps=40, slow=20, replicas=2))
    obj["spec"]["template"]["spec"]["hostNetwork"] = True
    return obj


@pytest.fixture
def allowed(site: Site) -> Iterator[None]:
    """The tests' namespace is `restricted`, which the host's network is not."""
    label = ("label", "namespace", site.namespace, "--overwrite")
    level = "pod-security.kubernetes.io/enforce"
    site.kubectl(*label, f"{level}=privileged", check=True)
    yield
    for name in NAMES:
        site.delete(name)
    site.kubectl(*label, f"{level}=restricted", check=True)


@pytest.mark.usefixtures("allowed")
def test_two_gangs_train_side_by_side_on_the_same_nodes(site):
    plugin = Plugin(site.cluster.kubeconfig, site.namespace)
    site.apply(*map(on_host, NAMES))  # both draw the same port in 1 of 2,000 pairs
    for name in NAMES:
        site.wait_phase(name, "Running")
        assert len(site.nodes(name)) == 2

    def told() -> bool | None:
        """Steps and speed come from the pages of the pods, at ports that no spec names."""
        rows = {line.split()[0]: line for line in plugin.says("status").splitlines()[1:]}
        table = plugin.says("status", NAMES[0]).splitlines()[-2:]
        steps = all("/40" in rows[name] for name in NAMES)
        return True if steps and all(line.split()[6] != "-" for line in table) else None

    wait_for(told, "the steps of both gangs in the plugin")
    for name in NAMES:
        site.hurry(name)
    for name in NAMES:
        status = site.wait_phase(name, "Succeeded")
        assert (status["restarts"]["total"], status["restarts"].get("inPlace", 0)) == (0, 0)
    results = [site.result(name) for name in NAMES]
    assert results[0] == results[1]
