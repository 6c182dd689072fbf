"""Operators are killed while a gang trains: nothing of it changes."""

from __future__ import annotations

import pytest

from support.cluster import wait_for
from support.site import Site, digits


@pytest.mark.fault("O6")
def test_an_operator_killed_while_a_job_runs_changes_nothing(site: Site) -> None:
    name = "operator-killed"
    site.apply(digits(name, steps=100_000, step_seconds=0.1))
    site.wait_running(name, 1)
    before = site.uids(name)
    for _ in range(3):
        seen = site.progress(name, "step")
        site.kill_operator()
        # Its progress moves on only when a new operator process has taken over.
        wait_for(
            lambda seen=seen: site.progress(name, "step") > seen + 5,
            "a new operator to report progress",
        )
    status = site.status(name)
    assert site.uids(name) == before
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)
    site.delete(name)
