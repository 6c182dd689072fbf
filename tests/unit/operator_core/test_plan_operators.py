"""Operators of two Leases on one job: one acts, the other waits, or takes over from a dead one."""

from dataclasses import replace
from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core import operators
from ddpjob_operator.core.objects import status as status_
from support.world import World, job_object

A, B, C = "a/op", "b/op", "c/op"
SOON = operators.PATIENCE.total_seconds()


class Two:
    """Operators that take turns on one job; each has its own memory."""

    def __init__(self, **spec: Any) -> None:
        self.world = World(job_object(**spec))
        self._known = {
            lease: act.ApiFeedback(lease=lease, version=f"1 of {lease}") for lease in (A, B, C)
        }

    def play(self, lease: str) -> World:
        """Let that one do all that it has to do now."""
        self.world.feedback = self._known[lease]
        self.world.settle()
        self._known[lease] = self.world.feedback
        return self.world

    def restart(self, lease: str, version: str) -> None:
        self._known[lease] = act.ApiFeedback(lease=lease, version=version)

    def runs(self, **status: Any) -> World:
        """A gang of A's that runs."""
        self.play(A)
        self.world.all_run()
        self.play(A)
        self.world.job["status"] |= status
        self.world.log.clear()
        return self.world

    @property
    def operator(self) -> dict[str, Any]:
        return dict(self.world.status["operator"])

    @property
    def reports(self) -> bool:
        found = self.world.condition("Stalled")
        return found is not None and (found["status"], found["reason"]) == ("True", operators.OTHER)


@pytest.fixture
def two() -> Two:
    return Two(restart={"backoff": {"maxSeconds": 1}})


def test_it_signs_what_it_writes_anyway_and_one_with_its_lease_goes_on(two):
    """As in a rolling upgrade."""
    world = two.runs()
    assert two.operator == {"lease": A, "version": f"1 of {A}"}
    two.restart(A, "2")
    assert two.play(A).log == [], "a name is no reason to write"
    del world.pods["job-1"]
    two.play(A)
    assert (two.operator, world.counts[0]) == ({"lease": A, "version": "2"}, 1)


@pytest.mark.fault("O5")
def test_while_the_other_lives_it_does_nothing_but_ask(two):
    world = two.runs()
    before = {**world.status}
    two.play(B)
    assert len(world.log) == 1
    assert {**world.status, "operator": before["operator"]} == before, "no other field is written"
    assert (two.operator["lease"], two.operator["other"]) == (A, B)
    two.play(A)
    assert two.reports
    message = world.condition("Stalled")["message"]
    for words in (A, B, "namespaces"):
        assert words in message
    world.log.clear()
    del world.pods["job-1"]
    for _ in range(4):
        world.now += operators.PATIENCE
        assert two.play(B).log == []
    two.play(A)
    assert (world.status["attempt"], two.operator["lease"]) == (2, A)


def test_an_answer_is_enough_for_five_minutes_then_silence_is_noticed(two):
    world = two.runs()
    two.play(B)
    two.play(A)
    world.log.clear()
    world.now += operators.AGAIN / 2
    assert two.play(B).log == []
    world.now += operators.AGAIN / 2
    two.play(B)
    assert "answered" not in two.operator
    world.now += operators.PATIENCE
    two.play(B)
    assert two.operator == {"lease": B, "version": f"1 of {B}"}


@pytest.mark.fault("O5")
def test_an_operator_takes_over_from_a_dead_one_which_then_waits(two):
    """helm uninstall A, helm install B: within a minute a lost pod is replaced."""
    world = two.runs()
    two.play(B)
    del world.pods["job-1"]
    todo = world.plan()
    assert todo.actions == ()
    assert todo.requeue_after == pytest.approx(SOON)
    world.now += operators.PATIENCE
    (first,) = world.plan().actions
    assert isinstance(first, act.WriteStatus)
    assert first.takes_over
    two.play(B)
    assert (world.status["attempt"], two.operator["lease"]) == (2, B)
    assert sorted(world.pods) == ["job-0", "job-1", "job-2"]
    # The first one was only slow: from now on it is the one that waits.
    world.log.clear()
    two.play(A)
    assert len(world.log) == 1
    assert (two.operator["lease"], two.operator["other"]) == (B, A)


def test_one_that_has_stopped_asking_is_forgotten(two):
    world = two.runs()
    two.play(B)
    two.play(A)
    world.now += operators.FORGOTTEN / 2
    two.play(A)
    assert two.reports
    wake = world.plan().requeue_after
    assert wake is not None
    assert wake <= operators.FORGOTTEN.total_seconds() / 2
    world.now += operators.FORGOTTEN / 2
    two.play(A)
    assert two.operator == {"lease": A, "version": f"1 of {A}"}
    assert not two.reports


def test_a_third_one_relies_on_the_answer_that_another_got(two):
    """Else two of them would ask in turns, without an end."""
    world = two.runs()
    for lease in (B, A):
        two.play(lease)
    world.log.clear()
    world.now += operators.PATIENCE
    assert two.play(C).log == []
    world.now += operators.AGAIN
    two.play(C)
    assert two.operator["other"] == C


@pytest.mark.parametrize("suspended", [False, True])
def test_it_answers_in_any_phase(two, suspended):
    world = two.runs()
    if suspended:
        world.job["spec"]["suspend"] = True
        two.play(A)
    else:
        world.all_end(0)
        two.play(A)
        world.job["status"]["operator"] |= {"other": B, "asked": world.now.isoformat()}
    two.play(B)
    two.play(A)
    assert two.operator["answered"]
    assert world.status["phase"] == ("Suspended" if suspended else "Succeeded")


def test_a_job_that_has_ended_is_taken_over_once_there_is_something_to_do():
    two = Two(ttlSecondsAfterFinished=3600)
    world = two.runs()
    world.all_end(0)
    two.play(A)
    world.now += operators.FORGOTTEN  # what follows an end is done
    two.play(A)
    world.log.clear()
    assert two.play(B).log == [], "thousands of such jobs may be there"
    world.now = world.now.replace(year=2027)
    two.play(B)
    world.now += operators.PATIENCE
    world.feedback = two._known[B]
    (takes,) = world.plan().actions
    world.carry_out(takes)
    assert [type(one) for one in world.plan().actions] == [act.DeleteJob]


def test_one_that_goes_is_not_asked_for(two):
    world = two.runs()
    world.job["metadata"]["deletionTimestamp"] = world.now.isoformat()
    world.feedback = replace(act.ApiFeedback(), lease=B)
    assert not any(isinstance(one, act.WriteStatus) for one in world.plan().actions)


@pytest.mark.parametrize("lease", [A, B])
def test_an_old_definition_that_drops_the_name_causes_no_endless_writes(two, lease):
    two.world.api.prunes = frozenset({"operator", "observedGeneration"})
    two.runs()
    assert "operator" not in two.world.status
    two.play(lease)  # of its own memory: a new process may write once
    two.world.log.clear()
    assert two.play(lease).log == []


def test_fields_of_a_newer_operator_are_kept(two):
    stored = {"phase": "Running", "attempt": 3, "later": {"a": [1]}}
    read = status_.from_dict(stored)
    assert status_.to_dict(replace(read, phase="Failed"))["later"] == {"a": [1]}
    assert status_.to_dict(status_.from_dict({})).keys().isdisjoint({"later"})
    assert status_.from_dict(status_.to_dict(two.runs() and read)).unknown == {"later": {"a": [1]}}
    whole = status_.from_dict(two.world.status)
    assert whole.unknown == {}, "what it writes itself it knows"


NOW = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    "forged",
    [
        {"lease": C, "other": B},
        {"lease": C, "other": B, "asked": "2999-01-01T00:00:00Z"},
        {"lease": C, "other": A, "asked": "1999-01-01T00:00:00Z"},
        {"lease": C, "other": C, "asked": NOW, "answered": "2999-01-01T00:00:00Z"},
        {"lease": C, "other": B, "asked": NOW, "answered": "x"},
        {"lease": B, "other": B, "asked": NOW},
        {"lease": 7, "other": [], "asked": {}},
        "x",
    ],
)  # fmt: skip
def test_whatever_name_somebody_forges_the_job_gets_to_an_end(two, forged):
    world = two.runs(operator=forged)
    del world.pods["job-1"]
    for _ in range(4):
        two.play(B)
        if len(world.pods) == 3:
            world.all_run()
        world.now += operators.AGAIN
        two.play(B)
    world.all_end(0)
    two.play(B)
    assert (world.phase, world.status["attempt"]) == ("Succeeded", 2)
