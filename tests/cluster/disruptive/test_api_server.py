"""The API server is away: what trains goes on, and no failure is counted."""

from __future__ import annotations

import pytest

from support.cluster import wait_for
from support.plane import Plane
from support.site import STEPS, Finished, Site, digits, newest_snapshot

pytestmark = pytest.mark.tier("all")


@pytest.mark.fault("A6", "O6")
def test_the_api_server_is_away_while_a_gang_trains(site: Site, finished: Finished) -> None:
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
    folder = site.volume() / name
    plane = Plane(site.cluster)
    plane.kill("apiserver")
    try:
        reached = newest_snapshot(folder)
        wait_for(lambda: newest_snapshot(folder) >= reached + 20, "20 steps more")
    finally:
        plane.repair()
    after = finished(name)
    restarts = after["restarts"]
    assert (after["attempt"], restarts["total"], restarts["inPlace"]) == (1, 0, 0), after
    site.delete(name)
