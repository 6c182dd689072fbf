"""Operators are killed while a gang trains, or restarts: it ends in the same weights."""

from __future__ import annotations

import random
import time

import pytest

from support.cluster import wait_for
from support.site import STEPS, Finished, Site, digits


@pytest.mark.fault("O6")
def test_an_operator_killed_while_a_job_runs_changes_nothing(site: Site) -> None:
    name = "operator-killed"
    site.apply(digits(name, steps=100_000, step_seconds=0.1))
    site.wait_running(name, 1)
    before = {pod: body["metadata"]["uid"] for pod, body in site.pods(name).items()}
    for _ in range(3):
        seen = site.progress(name, "step")
        site.kill_operator()
        # Its progress moves on only when a new operator process has taken over.
        wait_for(
            lambda seen=seen: site.progress(name, "step") > seen + 5 or None,
            "a new operator to report progress",
        )  # fmt: skip
    after = {pod: body["metadata"]["uid"] for pod, body in site.pods(name).items()}
    status = site.status(name)
    assert after == before
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    site.delete(name)


@pytest.mark.tier("all")
@pytest.mark.fault("O1")
def test_operator_killed_at_random_moments_of_restarts(site: Site, finished: Finished) -> None:
    name, kills, draw = "operator-killed-often", 4, random.Random(1)
    backoff = {"initialSeconds": 1, "maxSeconds": 1}
    restart = {"maxRestarts": kills, "backoff": backoff, "inPlace": {"enabled": False}}
    site.apply(digits(name, steps=STEPS, slow=1, every=5, restart=restart))
    for attempt in range(1, kills + 1):
        seen = site.wait_running(name, attempt).get("progress", {}).get("snapshotStep", 0)
        if attempt % 4 == 1:  # now and then let training get on
            wait_for(
                lambda seen=seen: (
                    site.progress(name, "snapshotStep") > seen or None
                ),
                "a newer snapshot",
            )  # fmt: skip
        site.kill_training(f"{name}-{attempt % 3}")
        time.sleep(draw.uniform(0, 3))  # the moment is random on purpose; nothing waits for it
        site.kill_operator(pods_too=True)
    site.wait_running(name, kills + 1)
    after = finished(name)
    assert (after["attempt"], after["restarts"]["total"]) == (kills + 1, kills)
    pods = site.pods(name)
    assert set(pods) == {f"{name}-{replica}" for replica in range(3)}
    attempts = {pod["metadata"]["labels"]["ddpjob.dev/attempt"] for pod in pods.values()}
    assert attempts == {str(kills + 1)}
    site.delete(name)
