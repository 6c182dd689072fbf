"""Processes die or hang while their pods live: the gang restarts in place, and who did is told."""

from typing import Any

import pytest

from support.cluster import wait_for
from support.site import STEPS, Site, digits, unhurried


def wait_rounds(site: Site, name: str, rounds: int) -> dict[str, Any]:
    """The status once so many restarts in place are counted."""

    def counted() -> dict[str, Any] | None:
        status = site.status(name)
        return status if status["restarts"]["inPlace"] >= rounds else None

    return site.wait(name, counted, f"{name}: {rounds} restarts in place")


@pytest.mark.fault("N1")
def test_a_killed_process_comes_back_in_its_pod(site, finished):
    """One after the other: the process of rank 0, of another rank, and two at once."""
    name = "round-kill"
    site.apply(unhurried(digits(name, steps=STEPS, slow=1, every=5)))
    newest = rounds = 0
    before: dict[str, str] = {}
    for replicas in ((0,), (1,), (0, 2)):
        newest = site.wait_running(name, 1, snapshot_after=newest)["progress"]["snapshotStep"]
        before = before or site.uids(name)
        site.kill_training(*(f"{name}-{replica}" for replica in replicas))
        after = wait_rounds(site, name, rounds + 1)
        rounds, failure = after["restarts"]["inPlace"], after["lastFailure"]
        assert failure["inPlace"] is True
        assert failure["replica"] in replicas, failure
        assert (failure["class"], failure["signal"], failure["exitCode"]) == ("Killed", 9, 137)
        assert failure["node"].startswith("node")
        told = f"replica {failure['replica']} (rank {failure['rank']})"
        wait_for(
            lambda told=told: told in site.describe(name),
            f"an event that tells of {told}",
        )  # fmt: skip
    after = finished(name)
    restarts = after["restarts"]
    assert (after["attempt"], restarts["total"], restarts["charged"]) == (1, 0, 0), after
    # The second of two kills may come when the round of the first is over already.
    assert restarts["inPlace"] in (3, 4), after
    assert "RestartedInPlace" in site.describe(name)
    assert site.uids(name) == before
    site.delete(name)
