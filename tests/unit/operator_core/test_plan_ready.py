"""The condition Ready, by which kstatus judges a kind that it does not know."""

from __future__ import annotations

from support.gitops import kstatus
from support.world import World, job_object


def told(world: World) -> tuple[str, str, str]:
    """Status and reason of Ready, and what kstatus makes of the job."""
    ready = world.condition("Ready")
    return ready["status"], ready["reason"], kstatus(world.job)


def test_it_is_told_from_the_first_write_on():
    world = World(job_object())
    (write,) = world.plan().actions
    world.carry_out(write)
    assert told(world) == ("False", "Pending", "InProgress")


def test_a_gang_is_ready_while_it_runs_and_once_it_has_succeeded():
    world = World(job_object()).settle()
    assert told(world) == ("False", "Starting", "InProgress")
    assert told(world.run()) == ("True", "Running", "Current")
    world.end(1, 137)
    assert told(world) == ("False", "Starting", "InProgress")
    assert told(world.run()) == ("True", "Running", "Current")
    for replica in range(3):
        world.end(replica, 0)
    assert told(world) == ("True", "Succeeded", "Current")


def test_failure_for_good_is_failure_for_kstatus_too():
    world = World(job_object(restart={"maxRestarts": 0})).settle().run()
    assert told(world.end(0, 1)) == ("False", "Failed", "Failed")
    assert world.condition("Stalled")["reason"] == "MaxRestartsExceeded"
