"""The condition Ready, by which kstatus judges a kind that it does not know."""

from __future__ import annotations

from support.gitops import kstatus
from support.world import World, job_object, running


def told(world: World) -> tuple[str, str, str]:
    """Status and reason of Ready, and what kstatus makes of the job."""
    ready = world.condition("Ready")
    return ready["status"], ready["reason"], kstatus(world.job)


def test_a_gang_is_ready_while_it_runs_and_once_it_has_succeeded():
    world = World(job_object())
    world.carry_out(world.plan().actions[0])
    assert told(world) == ("False", "Pending", "InProgress"), "from the first write on"
    assert told(world.settle()) == ("False", "Starting", "InProgress")
    assert told(world.run()) == ("True", "Running", "Current")
    world.end(1, 137)
    assert told(world) == ("False", "Starting", "InProgress")
    assert told(world.run()) == ("True", "Running", "Current")
    assert told(world.all_end(0).settle()) == ("True", "Succeeded", "Current")


def test_failure_for_good_is_failure_for_kstatus_too():
    world = running(restart={"maxRestarts": 0}).end(0, 1)
    assert (told(world), world.stalled) == (("False", "Failed", "Failed"), "MaxRestartsExceeded")
