"""Everybody does anything in any order: a state machine that hypothesis drives and shrinks.

Two jobs share a cluster. The user, kubelets, nodes, the quota, admission, the clock, the store
and one or two operators move as drawn; every write is held against the invariants. In the end
the world is healed and both jobs must come to an end. A failure prints the shortest story.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddpjob_contract import crd
from ddpjob_operator.shell.api import error_from_status
from model.cluster import NODES
from model.faults import SEEN, UNSEEN
from model.operators import Operator
from model.story import World, job_body

LOOP = asyncio.new_event_loop()
JOBS = ("a", "b")
CODES = (0, 1, 2, 74, 75, 76, 137, 143)
INDEX = st.integers(0, 5)
SPECS = st.fixed_dictionaries(
    {"replicas": st.integers(1, 3)},
    optional={
        "restart": st.fixed_dictionaries(
            {"maxRestarts": st.integers(0, 2)},
            optional={"replaceSeconds": st.sampled_from((0, 30))},
        ),
        "startupDeadlineSeconds": st.sampled_from((30, 600)),
        "activeDeadlineSeconds": st.sampled_from((60, 3600)),
        "ttlSecondsAfterFinished": st.sampled_from((0, 60)),
        "cleanPodPolicy": st.sampled_from(("Running", "All")),
        "suspend": st.booleans(),
    },
)
#: CEL lets another template pass while suspended only; a field unseen by it may change any time.
EDITS = (
    *({"suspend": value} for value in (True, False)),
    *({"activeDeadlineSeconds": seconds} for seconds in (1, 3600)),
    *({"restart": {"maxRestarts": limit}} for limit in range(4)),
    *({"template": {"spec": {"containers": [{"name": "trainer", "image": image}]}}}
      for image in ("trainer", "other")),
)  # fmt: skip
#: Somebody writes another attempt on a pod of ours, or takes a label off.
LABELS = (
    *((crd.LABEL_ATTEMPT, number) for number in ("1", "7", "999999999", "x")),
    (crd.LABEL_JOB_UID, None),
)


def move(**drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A rule after which everybody moves on, for a while or not at all."""

    def decorate(act: Callable[..., None]) -> Any:
        @functools.wraps(act)
        def moved(self: Machine, then: int, **values: Any) -> None:
            act(self, **values)
            for _ in range(then):
                self.world.tick()

        del moved.__wrapped__  # type: ignore[attr-defined]
        return rule(then=st.integers(0, 12), **drawn)(moved)

    return decorate


class Story(RuleBasedStateMachine):
    """Every write of the world is held against the invariants, and in the end all is well."""

    world: World

    @invariant()
    def all_hold(self) -> None:
        self.world.verify()

    def teardown(self) -> None:
        try:
            self.world.heal()
            self.world.must_end()
        finally:
            for operator in self.world.operators:
                operator.dead = True
            self.world.bury()

    @move()
    def nothing_happens(self) -> None:
        pass


class Machine(Story):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(LOOP, fate=lambda *_: None)
        self.harms: dict[int, str] = {}
        self.world.wire.gate = lambda call: self.harms.pop(call.number, "")

    @initialize(first=SPECS, second=SPECS, holds=st.booleans())
    def begin(self, first: dict[str, Any], second: dict[str, Any], holds: bool) -> None:
        self.world.holds = holds
        for name, spec in zip(JOBS, (first, second), strict=True):
            self.world.cluster.create(crd.PLURAL, job_body(name, **spec))

    # --- time passes ---

    @move()
    def all_goes_well(self) -> None:
        """Until both gangs run, if nothing is in the way."""
        for _ in range(60):
            if all(self.world.phase(name) == "Running" for name in JOBS):
                return
            if not self.world.tick():
                self.world.sleep()

    @move(count=st.integers(1, 4))
    def kubelets_move(self, count: int) -> None:
        for _ in range(count):
            self.world.move_machines()

    @move(seconds=st.sampled_from((1, 3, 31, 700)))
    def time_passes(self, seconds: float) -> None:
        self.world.sleep(seconds)

    # --- pods and nodes ---

    @move(index=INDEX, code=st.sampled_from(CODES))
    def a_process_ends(self, index: int, code: int) -> None:
        if pods := [pod for pod in self.world.cluster.pods() if self.world.cluster.runs(pod)]:
            self.world.cluster.finish(pods[index % len(pods)], code)

    @move(index=INDEX, how=st.sampled_from(("delete", "evict", "force")))
    def a_pod_goes(self, index: int, how: str) -> None:
        if pods := self.world.cluster.pods():
            self.world.lose(pods[index % len(pods)], how)

    @move(index=INDEX, label=st.sampled_from(LABELS))
    def somebody_relabels(self, index: int, label: tuple[str, str | None]) -> None:
        if pods := self.world.cluster.pods():
            self.world.relabel(pods[index % len(pods)], *label)

    @move(node=st.sampled_from(NODES))
    def a_node_falls_silent(self, node: str) -> None:
        if node not in self.world.cluster.silent:
            self.world.cluster.silence(node)

    @move(pulls=st.booleans())
    def images_can_be_pulled(self, pulls: bool) -> None:
        self.world.pulls = pulls

    # --- what the API server refuses, and how it answers ---

    @move(pods=st.one_of(st.none(), st.integers(0, 4)))
    def the_quota_is(self, pods: int | None) -> None:
        self.world.cluster.quota = pods

    @move(code=st.sampled_from((0, 403, 500)), plural=st.sampled_from(("Pod", "Service")))
    def admission_refuses(self, code: int, plural: str) -> None:
        refused = error_from_status(code, {"reason": "Forbidden", "message": "not today"})
        self.world.cluster.refuse = lambda body: (
            refused if code and body.get("kind") == plural else None
        )

    @move(ahead=st.integers(0, 6), harm=st.sampled_from((*UNSEEN, *SEEN)))
    def a_call_meets(self, ahead: int, harm: str) -> None:
        if harm in ("late", "hold"):
            self.world.state.deposed = True
        self.harms[len(self.world.wire.calls) + ahead] = harm

    @move(what=st.sampled_from(("nodes", "watches", "calls")))
    def it_is_over(self, what: str) -> None:
        """Nodes and watches come back; what was under way arrives."""
        if what == "nodes":
            self.world.cluster.heal_nodes()
        elif what == "watches":
            self.world.frozen.clear()
        else:
            self.world.wire.deliver_late()

    # --- operators ---

    @move(behind=st.sampled_from((0, 1, 5, 1000)), pods=st.sampled_from((None, 0, 5, 1000)))
    def the_operator_restarts(self, behind: int, pods: int | None) -> None:
        if (operator := self._operator(-1)) is not None:
            self.world.restart(operator, behind, pods)

    @precondition(lambda self: len(self.world.operators) < 2)
    @move(behind=st.sampled_from((0, 5)))
    def another_one_acts(self, behind: int) -> None:
        self.world.state.deposed = True
        self.world.start_operator(behind)

    @move(index=INDEX, plurals=st.sampled_from((("pods",), (crd.PLURAL,))))
    def a_watch_is_silent(self, index: int, plurals: tuple[str, ...]) -> None:
        if (operator := self._operator(index)) is not None:
            self.world.freeze(operator, plurals=plurals)

    @move(index=INDEX, plural=st.sampled_from(("pods", crd.PLURAL)))
    def events_are_lost(self, index: int, plural: str) -> None:
        if (operator := self._operator(index)) is not None:
            operator.lose(plural)

    @move(hours=st.sampled_from((-1, 1)))
    def a_clock_jumps(self, hours: int) -> None:
        for operator in self.world.operators:
            operator.jump(hours)

    @move(back=st.integers(1, 12))
    def etcd_is_restored(self, back: int) -> None:
        """As the docs say: and the operator is restarted."""
        self.world.cluster.restore(back)
        for operator in self.world.operators:
            operator.dead = True
        self.world.bury()
        self.harms.clear()

    # --- the user ---

    @move(name=st.sampled_from(JOBS), fields=st.sampled_from(EDITS))
    def the_user_edits(self, name: str, fields: dict[str, Any]) -> None:
        self.world.edit(name, **fields)

    @move(name=st.sampled_from(JOBS))
    def delete_and_recreate(self, name: str) -> None:
        job = self.world.cluster.job(name)
        if job is not None:
            self.world.cluster.delete(crd.PLURAL, name)
            self.world.cluster.create(crd.PLURAL, job_body(name))

    def _operator(self, index: int) -> Operator | None:
        self.world.bury()
        alive = self.world.operators
        return alive[index % len(alive)] if alive else None


TestMachine = pytest.mark.timeout(0)(Machine.TestCase)
TestMachine.settings = settings()
