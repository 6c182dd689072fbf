"""Gangs that share little room: whole or not at all, whatever everybody does.

Three jobs of different sizes and modes, of which two are edited, in a cluster whose nodes come and
go and whose API for PodGroups is switched off and on. All that disturbs test_machine's jobs
disturbs these, but for what ends the memory of a cluster or of its clocks.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from ddpjob_contract import crd
from ddpjob_operator.shell.api import PODGROUPS
from model import test_machine
from model.cluster import NODES, group_of
from model.faults import SEEN
from model.scheduling import GroupWorld, scheduled
from model.story import job_body
from model.test_machine import INDEX, LOOP, move
from model.wire import Call
from support.objects import leaving, name

JOBS = (*test_machine.JOBS, "c")
MODES = st.builds(scheduled, st.sampled_from(("Auto", "Native", "None")), high=st.booleans())
SPECS = st.fixed_dictionaries(
    {"replicas": st.integers(1, 4), "startupDeadlineSeconds": st.sampled_from((30, 120))},
    optional={
        "restart": st.fixed_dictionaries(
            {"maxRestarts": st.integers(0, 2)},
            optional={"replaceSeconds": st.sampled_from((0, 30))},
        ),
        "activeDeadlineSeconds": st.just(3600),
        "suspend": st.booleans(),
    },
)


class Machine(test_machine.Machine):
    world: GroupWorld
    etcd_is_restored = a_clock_jumps = somebody_relabels = images_can_be_pulled = None

    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld(LOOP, fate=lambda *_: None)
        self.world.wire.gate = self._harm

    def _harm(self, call: Call) -> str:
        """Refusals are not about PodGroups: those make an operator go on without."""
        harm = self.harms.pop(call.number, "")
        if harm:
            self.world.disturbed()
        return "" if call.plural == PODGROUPS and harm in SEEN else harm

    @initialize(
        specs=st.tuples(*[SPECS] * 3),
        modes=st.tuples(*[MODES] * 3),
        rooms=st.integers(1, 3),
        seconds=st.sampled_from((0, 10)),
    )
    def begin(self, specs: Any, modes: Any, rooms: int, seconds: float) -> None:
        self.world.holds = True
        self.world.cluster.rooms = dict.fromkeys(NODES, rooms)
        for job, spec, mode in zip(JOBS, specs, modes, strict=True):
            self.world.cluster.create(crd.PLURAL, job_body(job, **spec, **mode))
        self.world.run(lambda: False, seconds)  # there may be gangs that run

    @move(first=INDEX, count=st.integers(1, 4))
    def the_scheduler_moves(self, first: int, count: int) -> None:
        for _ in range(count):
            self.world.scheduler.move(first)

    @move(node=st.sampled_from(NODES), pods=st.integers(0, 4))
    def a_node_has_other_room(self, node: str, pods: int) -> None:
        self.world.cluster.rooms[node] = pods

    @move(node=st.sampled_from(NODES))
    def a_node_is_drained(self, node: str) -> None:
        self.world.cluster.rooms[node] = 0
        for pod in self.world.cluster.pods():
            if pod["spec"].get("nodeName") == node:
                self.world.lose(pod, "evict")

    @move(served=st.booleans())
    def the_api_is_served(self, served: bool) -> None:
        self.world.cluster.gang_api = served

    @move(index=INDEX)
    def a_stranger_removes_a_group(self, index: int) -> None:
        if self.world.cluster.gang_api and (groups := self.world.cluster.groups()):
            self.world.cluster.delete(PODGROUPS, name(groups[index % len(groups)]))

    @move(index=INDEX)
    def a_higher_priority_takes_the_room(self, index: int) -> None:
        """From outside of the jobs: of a whole group."""
        bound = [pod for pod in self.world.cluster.pods() if pod["spec"].get("nodeName")]
        names = {group_of(pod) for pod in bound} - {"", *map(group_of, filter(leaving, bound))}
        if names:
            group = sorted(names)[index % len(names)]
            for pod in bound:
                if group_of(pod) == group:
                    self.world.lose(pod, "preempt")

    @move(seconds=st.sampled_from((200, 400)))
    def all_wait_in_peace(self, seconds: float) -> None:
        """Long enough for deadlines."""
        self.world.run(lambda: False, seconds)


class LongMachine(Machine):
    """The same, tried more often."""


def test_who_waits_whole_costs_no_writes_and_runs_as_room_appears(loop):
    world = GroupWorld(loop, fate=lambda *_: None, rooms=1)
    world.cluster.create(crd.PLURAL, job_body(startupDeadlineSeconds=30, **scheduled()))
    world.run(lambda: False, 60)
    before = len(world.cluster.history)
    world.run(lambda: False, 3600)
    assert world.cluster.history[before:] == []
    world.cluster.rooms = dict.fromkeys(NODES, 2)
    assert world.run(lambda: world.phase() == "Running", 60)
    assert world.cluster.status("job")["attempt"] == 1


TestMachine = pytest.mark.timeout(0)(pytest.mark.tier("gate")(Machine.TestCase))
TestMachine.settings = settings(max_examples=25)
TestLongMachine = pytest.mark.timeout(0)(pytest.mark.tier("all")(LongMachine.TestCase))
TestLongMachine.settings = settings(max_examples=max(400, settings().max_examples))  # `make soak`
