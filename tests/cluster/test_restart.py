"""A gang loses members in every way a cluster knows and ends in the same weights."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.cluster import wait_for
from support.site import Site, digits

Undisturbed = Callable[[int], dict[str, str]]
STEPS = 80
WITHOUT_ROUNDS = {"inPlace": {"enabled": False}}


def lose(site: Site, pod: str, how: str) -> None:
    if how == "process":
        site.kill_training(pod)
    elif how == "deleted":
        site.kubectl("delete", "pod", pod, "--wait=false", check=True)
    else:
        site.kubectl("delete", "pod", pod, "--grace-period=0", "--force", check=True)


def resumed_from(site: Site, name: str) -> int:
    """The snapshot step that rank 0 says it resumed from."""
    log = site.kubectl("logs", f"{name}-0", check=True).stdout
    found = re.search(r"resuming after step (\d+)", log)
    assert found, log
    return int(found.group(1))


@pytest.mark.parametrize("how", ["process", "deleted", "forced"])
def test_any_replica_lost_in_any_way(site: Site, undisturbed: Undisturbed, how: str) -> None:
    """Three jobs side by side, which fills two cores; each loses another replica."""
    wanted = undisturbed(STEPS)
    jobs = {f"lose-{how}-{replica}": replica for replica in range(3)}
    # Without restarts in place a killed process ends the attempt; a lost pod does so anyway.
    restart = WITHOUT_ROUNDS if how == "process" else {}
    site.apply(*(digits(name, steps=STEPS, restart=restart) for name in jobs))
    before: dict[str, dict[str, Any]] = {}

    def disturb_who_is_ready() -> bool | None:
        """Each job at its own moment: waiting for one after the other, the last would end."""
        for name in jobs.keys() - before.keys():
            status = site.status(name)
            if status.get("phase") == "Running" and status.get("progress", {}).get("step", 0) >= 25:
                before[name] = status
                lose(site, f"{name}-{jobs[name]}", how)
        return True if before.keys() == jobs.keys() else None

    wait_for(disturb_who_is_ready, "every job to be half-way", 180)
    for name, replica in jobs.items():
        after = site.wait_phase(name, "Succeeded")
        assert after["attempt"] == 2, after["failures"]
        restarts, failure = after["restarts"], after["lastFailure"]
        assert restarts["total"] == 1, after
        assert restarts["charged"] == (1 if how == "process" else 0), failure
        assert restarts["inPlace"] == 0, after
        assert failure["replica"] == replica, failure
        if how == "process":
            assert failure["signal"] == 9
            assert failure["node"].startswith("node")
        assert resumed_from(site, name) >= before[name]["progress"]["snapshotStep"] >= 10
        assert site.result(name) == wanted
        site.delete(name)


def test_two_replicas_killed_at_once_are_one_restart(site: Site, undisturbed: Undisturbed) -> None:
    name = "lose-two"
    site.apply(digits(name, steps=STEPS, restart=WITHOUT_ROUNDS))
    site.wait_running(name, 1, step=25)
    site.kill_training(f"{name}-0", f"{name}-2")
    after = site.wait_phase(name, "Succeeded")
    assert (after["attempt"], after["restarts"]["total"]) == (2, 1)
    assert site.result(name) == undisturbed(STEPS)
    site.delete(name)


def test_an_operator_killed_while_a_job_runs_changes_nothing(site: Site) -> None:
    name = "operator-killed"
    site.apply(digits(name, steps=1000, step_seconds=0.1))
    site.wait_running(name, 1)
    before = {pod: body["metadata"]["uid"] for pod, body in site.pods(name).items()}
    for _ in range(3):
        seen = site.progress(name, "step")
        site.kill_operator()
        # Its progress moves on only when a new operator process has taken over.
        wait_for(
            lambda seen=seen: site.progress(name, "step") > seen + 5 or None,
            "a new operator to report progress", 90,
        )  # fmt: skip
    after = {pod: body["metadata"]["uid"] for pod, body in site.pods(name).items()}
    status = site.status(name)
    assert after == before
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    site.delete(name)


def test_operator_killed_at_random_moments_of_twenty_restarts(
    site: Site, undisturbed: Undisturbed
) -> None:
    name, steps, kills, draw = "operator-killed-often", 150, 20, random.Random(1)
    backoff = {"initialSeconds": 1, "maxSeconds": 1}
    restart = {"maxRestarts": kills, "backoff": backoff, **WITHOUT_ROUNDS}
    site.apply(digits(name, steps=steps, step_seconds=0.2, every=5, restart=restart))
    for attempt in range(1, kills + 1):
        seen = site.wait_running(name, attempt).get("progress", {}).get("snapshotStep", 0)
        if attempt % 4 == 1:  # now and then let training get on
            wait_for(
                lambda seen=seen: (
                    site.progress(name, "snapshotStep") > seen or None
                ),
                "a newer snapshot", 60,
            )  # fmt: skip
        site.kill_training(f"{name}-{attempt % 3}")
        time.sleep(draw.uniform(0, 3))  # the moment is random on purpose; nothing waits for it
        site.kill_operator()
    site.wait_running(name, kills + 1)
    after = site.wait_phase(name, "Succeeded", timeout=300)
    assert (after["attempt"], after["restarts"]["total"]) == (kills + 1, kills)
    pods = site.pods(name)
    assert set(pods) == {f"{name}-{replica}" for replica in range(3)}
    attempts = {pod["metadata"]["labels"]["ddpjob.dev/attempt"] for pod in pods.values()}
    assert attempts == {str(kills + 1)}
    assert site.result(name) == undisturbed(steps)
    site.delete(name)
