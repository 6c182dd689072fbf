"""Every plan: a fault, and the moment of the story at which it comes.

The moments are learned: `trace.json` holds the operator's writes and the store's events of a
story that nothing disturbed, by name (roles.py); a test plays it anew and compares. An id such as
`create-pod-2-of-1/crash-after-commit` is the same in every run:
python -m pytest tests/api/test_plans.py -k 'ID' plays that plan, and no other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from api import arms
from api.story import Play
from support.arena import arena
from support.cluster import ROOT, Cluster

TRACE = Path(__file__).with_name("trace.json")
#: `make test-all` plays one plan of so many, and one of each kind; the gate one of each kind.
THINNED = 16
#: The writes of a restart: in both the operator dies at each, before it, after it, and after the
#: reply.
RESTART = ("status-restarting-2", "delete-pod-0-of-1", "delete-pod-2-of-1", "status-starting-2",
           "create-pod-0-of-2", "create-pod-2-of-2", "status-running-2")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """``kind`` names what is done, ``place`` when. ``group`` is the test that plays it."""

    place: str
    kind: str
    group: str
    arm: Callable[[Play, str], None]

    @property
    def id(self) -> str:
        return f"{self.place}/{self.kind}"


def plan_of(item: pytest.Item) -> Plan | None:
    """The plan that a test plays; a ``plan`` of another level's tests is none of ours."""
    found = getattr(getattr(item, "callspec", None), "params", {}).get("plan")
    return found if isinstance(found, Plan) else None


def everything() -> list[Plan]:
    """All plans, in the order of the story."""
    trace = json.loads(TRACE.read_text())
    writes = trace["writes"]
    found = [*_writes(writes), *_views(trace), *_others(writes), *_rights()]
    ids = " ".join(plan.id for plan in found)
    assert all(ids.count(plan.id) == 1 for plan in found), "an id must name one plan and no other"
    return found


def sample(plans: Sequence[Plan], *, kinds_only: bool = False) -> list[Plan]:
    """Some of them, always the same, with each kind among them."""
    ranked = sorted(plans, key=lambda plan: hashlib.sha256(plan.id.encode()).hexdigest())
    first = {plan.kind: plan for plan in reversed(ranked)}
    others = [] if kinds_only else ranked[::THINNED]
    deaths = [one for one in plans if one.place in RESTART and one.kind.startswith("crash")]
    chosen = {plan.id for plan in [*first.values(), *others, *deaths]}
    return [plan for plan in plans if plan.id in chosen]


def _writes(roles: Sequence[str]) -> Iterator[Plan]:
    for place, (kind, arm) in itertools.product(roles, arms.AT_A_WRITE.items()):
        yield Plan(place, kind, "writes", arm)


#: Where views go wrong and others act: at the writes that change what is to be done.
TURNS = ("status-starting-1", "status-running-1", "status-restarting-2", "status-starting-2",
         "status-running-2", "status-succeeded-2")  # fmt: skip


def _views(trace: dict[str, list[str]]) -> Iterator[Plan]:
    for place, (kind, arm) in itertools.product(TOLD, arms.OF_AN_EVENT.items()):
        assert place in trace["events"], f"no story has the event {place}"
        yield Plan(place, kind, "views", arm)
    for replica in (0, 2):  # the other has failed, and goes at once
        yield Plan(f"pod-{replica}-of-1-leaving", "slow-to-end", "pods", arms.slow_to_end)
    for place, (kind, arm) in itertools.product(TURNS, arms.OF_A_VIEW.items()):
        yield Plan(place, kind, "views", arm)


#: Events that an operator waits for, and of its own doing one each.
TOLD = ("job-new-0", "job-starting-1", "pod-0-of-1-created", "pod-2-of-1-running",
        "pod-1-of-1-failed", "pod-0-of-1-leaving", "pod-0-of-1-deleted", "pod-1-of-2-created",
        "pod-2-of-2-running", "pod-0-of-2-succeeded", "pod-2-of-2-deleted")  # fmt: skip


def _others(roles: Sequence[str]) -> Iterator[Plan]:
    for place, (kind, arm) in itertools.product(TURNS, arms.OF_ANOTHER.items()):
        yield Plan(place, kind, kind, arm)
    assert set(TURNS) <= set(roles)


#: The story has no use for these: a node that is silent, and an admission plugin that is off.
UNUSED = ("get-nodes", "list-leases", "update-ddpjobs-finalizers")


def _rights() -> Iterator[Plan]:
    """Each verb of the chart's roles, lost and given back."""
    rules = chart_rules()
    for rule, resource, verb in arms.verbs(rules):
        place = f"{verb}-{resource.replace('/', '-')}"
        if place not in UNUSED:
            arm = arms.lose_right(rules, rule, resource, verb)
            yield Plan(place, "right-lost", "rights", arm)


def play(plane: Cluster, folder: Path, plan: Plan | None) -> Play:
    """The story with that plan, from its beginning to its end."""
    with arena(plane.kubeconfig, folder, of_many=True) as stage:
        made = Play(stage)
        if plan is not None:
            plan.arm(made, plan.place)
        return made.run()


def chart_rules() -> list[arms.Rule]:
    """What the chart lets the operator do."""
    objects = (ROOT / "manifests" / "install.yaml").read_text().split("\n---\n")
    roles = [one for one in objects if "\nkind: ClusterRole\n" in one or "\nkind: Role\n" in one]
    found = [yaml.safe_load(one) for one in roles]
    mine = [one for one in found if "ddpjob-operator" in one["metadata"]["name"]]
    assert {one["kind"] for one in mine} == {"Role", "ClusterRole"}
    return [rule for one in mine for rule in one["rules"]]
