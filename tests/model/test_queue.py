"""Two jobs, one quota and a Kueue: stories drawn and told, and planners that break the rules."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from ddpjob_contract import crd
from ddpjob_operator.core.actions import Plan, QuorumRead, WriteWorkload
from ddpjob_operator.core.objects.workload import Condition, Workload
from model.faults import SEEN, UNSEEN
from model.kueue import QueueWorld, queued
from model.operators import Planner
from model.test_machine import CODES, INDEX, JOBS, LOOP, Story, move
from model.wrong import Question
from support import workloads
from support.invariants import Violation
from support.workloads import QUEUE

SPECS = st.fixed_dictionaries(
    {"replicas": st.integers(1, 3)},
    optional={
        "restart": st.fixed_dictionaries({"maxRestarts": st.integers(0, 2)}),
        "activeDeadlineSeconds": st.sampled_from((60, 3600)),
        "cleanPodPolicy": st.sampled_from(("Running", "All")),
        "suspend": st.booleans(),
    },
)


class QueueMachine(Story):
    """Two jobs of one queue, and whatever befalls them, Kueue and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.world = QueueWorld(LOOP, 3, fate=lambda *_: None)
        self.harms: dict[int, str] = {}
        self.world.wire.gate = lambda call: self.harms.pop(call.number, "")

    @initialize(
        specs=st.tuples(SPECS, SPECS),
        priorities=st.tuples(*2 * [st.sampled_from(("", "low", "high"))]),
    )
    def begin(self, specs: tuple[Any, ...], priorities: tuple[str, ...]) -> None:
        for name, spec, priority in zip(JOBS, specs, priorities, strict=True):
            self.world.cluster.create(crd.PLURAL, queued(name, priority, **spec))

    @move(seconds=st.sampled_from((1, 31, 700)))
    def time_passes(self, seconds: float) -> None:
        self.world.sleep(seconds)

    @move()
    def one_runs(self) -> None:
        """If nothing is in the way."""
        for _ in range(60):
            if any(self.world.phase(name) == "Running" for name in JOBS):
                return
            if not self.world.tick():
                self.world.sleep()

    @move(index=INDEX, code=st.sampled_from(CODES))
    def a_process_ends(self, index: int, code: int) -> None:
        if pods := [pod for pod in self.world.cluster.pods() if self.world.cluster.runs(pod)]:
            self.world.cluster.finish(pods[index % len(pods)], code)

    @move(index=INDEX, how=st.sampled_from(("delete", "evict", "force")))
    def a_pod_goes(self, index: int, how: str) -> None:
        if pods := self.world.cluster.pods():
            self.world.lose(pods[index % len(pods)], how)

    # --- Kueue and its administrator ---

    @move(
        index=INDEX,
        reason=st.sampled_from(("Preempted", "PodsReadyTimeout", "ClusterQueueStopped")),
    )
    def kueue_evicts(self, index: int, reason: str) -> None:
        held = [o for o in self.world.kueue.all() if workloads.true(dict(o), "QuotaReserved")]
        if held and not workloads.true(dict(held[index % len(held)]), "Finished"):
            self.world.kueue.play(held[index % len(held)], workloads.evict, reason)

    @move(index=INDEX, active=st.booleans())
    def somebody_deactivates(self, index: int, active: bool) -> None:
        if found := self.world.kueue.all():
            self.world.kueue.activate(found[index % len(found)], active)

    @move(index=INDEX)
    def somebody_deletes_a_workload(self, index: int) -> None:
        if found := self.world.kueue.all():
            self.world.cluster.delete("workloads", found[index % len(found)]["metadata"]["name"])

    @move(quota=st.integers(0, 6), asleep=st.booleans())
    def the_quota_is(self, quota: int, asleep: bool) -> None:
        self.world.kueue.quota, self.world.kueue.asleep = quota, asleep

    # --- the operator ---

    @move(ahead=st.integers(0, 6), harm=st.sampled_from((*UNSEEN, *SEEN)))
    def a_call_meets(self, ahead: int, harm: str) -> None:
        if harm in ("late", "hold"):
            self.world.state.deposed = True
        self.harms[len(self.world.wire.calls) + ahead] = harm

    @move(behind=st.sampled_from((0, 1, 5, 1000)))
    def the_operator_restarts(self, behind: int) -> None:
        self.world.bury()
        if self.world.operators:
            self.world.restart(self.world.operators[-1], behind)

    @move(plural=st.sampled_from(("pods", crd.PLURAL, "workloads")))
    def a_watch_is_silent(self, plural: str) -> None:
        self.world.bury()
        for operator in self.world.operators:
            self.world.freeze(operator, plurals=(plural,))

    @move()
    def watches_come_back(self) -> None:
        self.world.frozen.clear()

    # --- the user ---

    @move(name=st.sampled_from(JOBS), suspend=st.booleans())
    def the_user_suspends(self, name: str, suspend: bool) -> None:
        self.world.edit(name, suspend=suspend)

    @move(name=st.sampled_from(JOBS), queue=st.sampled_from((None, "team", "other")))
    def the_user_labels(self, name: str, queue: str | None) -> None:
        self.world.label(name, QUEUE, queue)

    @move(name=st.sampled_from(JOBS))
    def delete_and_recreate(self, name: str) -> None:
        if self.world.cluster.job(name) is not None:
            self.world.cluster.delete(crd.PLURAL, name)
            self.world.cluster.create(crd.PLURAL, queued(name))


TestQueueMachine = pytest.mark.timeout(0)(QueueMachine.TestCase)
TestQueueMachine.settings = settings()


def story(loop: asyncio.AbstractEventLoop, planner: Planner | None = None) -> QueueWorld:
    """A low job runs, a high one comes and takes its quota, ends, and the low one comes back."""
    more: dict[str, Any] = {} if planner is None else {"planner": planner}
    world = QueueWorld(loop, 3, fate=lambda job, *_: 0 if job == "b" else None, **more)
    world.cluster.create(crd.PLURAL, queued("a", "low"))
    assert world.run(lambda: world.phase("a") == "Running")
    world.cluster.create(crd.PLURAL, queued("b", "high"))
    if not world.run(lambda: world.phase("b") == "Succeeded"):
        raise Violation("i8_ends", "the job of high priority never gets its quota")
    assert world.run(lambda: world.phase("a") == "Running")
    world.heal()
    world.must_end()
    return world


def test_preemption_and_the_way_back(loop):
    world = story(loop)
    restarts = world.cluster.status("a")["restarts"]
    assert (restarts.get("total"), restarts.get("charged")) == (0, 0)
    assert world.cluster.status("a")["attempt"] == 2


def test_many_of_one_queue_each_get_their_turn(loop):
    world = QueueWorld(loop, 3)
    for name in ("a", "b", "c", "d"):
        world.cluster.create(crd.PLURAL, queued(name))
    world.must_end()
    ended = [world.cluster.status(name)["timings"]["completedAt"] for name in ("a", "b", "c", "d")]
    assert ended == sorted(ended), "in order of age"


def gives_back_at_once(*args: Any) -> Plan:
    """Takes the eviction itself for the proof that no pod is left."""
    asked = Question(*args)
    status = asked.job.status
    if status.get("phase") != "Pending" or status.get("membersSince", 0) <= asked.attempt:
        return asked.answer()
    gone = QuorumRead(asked.attempt, asked.now, over=True)
    found = replace(asked, pods=(), feedback=replace(asked.feedback, confirmed=gone)).answer()
    early = tuple(one for one in found.actions if isinstance(one, WriteWorkload))
    real = asked.answer()
    return replace(real, actions=(*early, *real.actions))


def starts_before_admission(*args: Any) -> Plan:
    """Takes a Workload that is there for one that is admitted."""
    asked = Question(*args)
    mine = tuple(map(_admitted, asked.feedback.workloads or ()))
    flavors = (mine[0].admission, {}) if mine else None
    feedback = replace(asked.feedback, workloads=mine, flavors=flavors)
    return replace(asked, feedback=feedback).answer()


def keeps_its_quota(*args: Any) -> Plan:
    """Ends the pods of an evicted gang, and never says so."""
    found = Question(*args).answer()
    left = tuple(a for a in found.actions if not (isinstance(a, WriteWorkload) and a.give_back))
    return replace(found, actions=left)


def _admitted(found: Workload) -> Workload:
    true = Condition(True, "Admitted", "", "")
    said = {"QuotaReserved": true, "Admitted": true}
    return replace(found, conditions={**found.conditions, **said}, active=True)


@pytest.mark.parametrize(
    ("planner", "name"),
    [
        (gives_back_at_once, "queue_quota_after_the_last_pod"),
        (starts_before_admission, "queue_no_pod_without_quota"),
        (keeps_its_quota, "i8_ends"),
    ],
)
def test_a_wrong_planner_is_found_out(loop, planner, name):
    with pytest.raises(Violation) as found:
        story(loop, planner)
    assert found.value.name == name


def test_a_workload_deleted_while_its_watch_is_silent_starts_no_pod():
    """Its last look showed quota: it looks once more before it makes pods."""
    machine = QueueMachine()
    machine.begin(specs=({"replicas": 1}, {"replicas": 1}), priorities=("", ""))
    machine.nothing_happens(then=12)
    machine.a_watch_is_silent(plural="workloads", then=0)
    machine.somebody_deletes_a_workload(index=0, then=11)
    machine.teardown()
