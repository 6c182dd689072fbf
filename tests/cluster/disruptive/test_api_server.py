"""The API server is away, or forgets: what trains goes on, and no failure is counted."""

import pytest

from support.cluster import wait_for
from support.plane import Plane, is_first, processes_with
from support.site import STEPS, Site, digits, job, newest_snapshot

pytestmark = pytest.mark.tier("all")


@pytest.mark.fault("A6", "O6")
def test_the_api_server_is_away_while_a_gang_trains(site, finished):
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


def launchers_of(site: Site, name: str) -> list[int]:
    """How many launchers of each replica run, as the machine has it."""
    here = {"DDPJOB_NAMESPACE": site.namespace, "DDPJOB_NAME": name}
    pids = (processes_with(**here, DDPJOB_REPLICA=str(replica)) for replica in range(3))
    return [len(list(filter(is_first, found))) for found in pids]


@pytest.mark.fault("A7")
def test_a_restored_etcd_loses_no_gang_and_doubles_none(site, finished, chronicle, tmp_path):
    """etcd goes back minutes: a job that ran, one in an earlier attempt, one ended, one unknown."""
    plane, again, later, over = Plane(site.cluster), "restored", "forgotten", "long-over"
    site.apply(job(over, ["true"]))
    ended = site.wait_phase(over, "Succeeded")
    # Its hub may know the number that the operator gives again, and turns that pod away so long.
    brief = {"replaceSeconds": 10}
    site.apply(digits(again, steps=STEPS, slow=4, every=2, restart=brief))
    site.wait_running(again, 1, snapshot_after=0)
    plane.save_store(tmp_path / "etcd")
    site.kubectl("delete", "pod", f"{again}-1", "--grace-period=0", "--force", check=True)
    unknown = digits(later, steps=STEPS, slow=4, every=2)
    site.apply(unknown)
    reached = site.wait_running(again, 2, snapshot_after=0)["progress"]["snapshotStep"]
    site.wait_running(later, 1, snapshot_after=0)
    assert chronicle.violations() == []

    plane.restore_store(tmp_path / "etcd")
    plane.repair()
    chronicle.begin_anew()

    wait_for(lambda: not any(launchers_of(site, later)), "pods that nobody knows to go")
    after = site.wait_running(again, 2, snapshot_after=reached)
    assert after["attempt"] > 1
    wait_for(lambda: launchers_of(site, again) == [1, 1, 1], "one gang")
    assert site.status(over) == ended
    site.apply(unknown)  # as its user would
    for name in (again, later):
        finished(name)
    for name in (again, later, over):
        site.delete(name)
