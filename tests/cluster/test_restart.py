"""A gang loses members in every way a cluster knows and ends in the same weights."""

from typing import Any

import pytest

from support.site import STEPS, Site, digits
from support.tiers import some_in_gate

WITHOUT_ROUNDS = {"inPlace": {"enabled": False}}


def lose(site: Site, pod: str, how: str) -> None:
    if how == "process":
        site.kill_training(pod)
    elif how == "deleted":
        site.kubectl("delete", "pod", pod, "--wait=false", check=True)
    else:
        site.kubectl("delete", "pod", pod, "--grace-period=0", "--force", check=True)


@pytest.mark.parametrize("how", some_in_gate(["process", "deleted", "forced"], "deleted"))
@pytest.mark.fault("N1", "N3")
def test_any_replica_lost_in_any_way(site, finished, how):
    """One after the other: each loss is one restart, from the newest snapshot."""
    name = f"lose-{how}"
    # Without restarts in place a killed process ends the attempt; a lost pod does so anyway.
    body = digits(name, steps=STEPS, slow=1, every=5)
    if how == "process":
        body["spec"]["restart"] = WITHOUT_ROUNDS
        # One kubelet tells of all ends: of two one may be so late that the cause is given up.
        body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node1"}
    site.apply(body)
    newest = 0
    for replica in range(3):
        attempt = replica + 1
        resumed = site.resumed_from(name, at_least=newest) if replica else 0
        before = site.wait_running(name, attempt, snapshot_after=resumed)
        newest = before["progress"]["snapshotStep"]
        lose(site, f"{name}-{replica}", how)
        after = site.wait_running(name, attempt + 1)
        check_counts(after, attempt, how)
        failure = after["lastFailure"]
        assert failure["replica"] == replica, failure
        if how == "process":
            assert failure["signal"] == 9
            assert failure["node"].startswith("node")
    check_counts(finished(name), 3, how)
    site.resumed_from(name, at_least=newest)
    site.delete(name)


def check_counts(status: dict[str, Any], losses: int, how: str) -> None:
    """Every loss is one restart; only what the program does itself is charged."""
    restarts = status["restarts"]
    assert status["attempt"] == losses + 1, status["failures"]
    assert restarts["total"] == losses, status
    classes = {failure["class"] for failure in status["failures"]}
    assert ("Killed" in classes) == (how == "process"), status["failures"]
    # A newer snapshot came between the losses, and may have come since: then the budget has healed.
    assert restarts["charged"] in ((0, 1) if how == "process" else (0,)), status["failures"]
    assert restarts["inPlace"] == 0, status
