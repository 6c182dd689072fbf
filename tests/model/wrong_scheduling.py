"""Planners that are wrong about PodGroups on purpose, and the day that finds each of them out.

Each is the real planner with one rule of its policy replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core import render
from ddpjob_operator.core.actions import Plan
from ddpjob_operator.core.capacity import pod_group
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.core.objects.spec import Spec
from ddpjob_operator.core.plan import plan
from ddpjob_operator.core.view import View
from model.operators import Planner
from model.scheduling import GroupWorld, scheduled
from model.story import job_body
from support.invariants import Violation


def _instead(module: Any, **rules: Callable[..., Any]) -> Planner:
    def wrong(*args: Any) -> Plan:
        kept = {name: getattr(module, name) for name in rules}
        try:
            for name, rule in rules.items():
                setattr(module, name, rule)
            return plan(*args)
        finally:
            for name, right in kept.items():
                setattr(module, name, right)

    return wrong


def _least(more: Callable[[Spec], int]) -> Planner:
    """The group wants so many pods more than the gang has replicas."""
    right = render.pod_group

    def body(job: Job, spec: Spec, *more_args: Any) -> dict[str, Any]:
        made = right(job, spec, *more_args)
        made["spec"]["schedulingPolicy"]["gang"]["minCount"] += more(spec)
        return made

    return _instead(render, pod_group=body)


def _of_nobody(*args: Any, since: int, group: str, right: Any = render.pod, **more: Any) -> Any:
    return right(*args, since=since, group="" if args[2] > since else group, **more)


def _whole_or_not(view: View) -> bool:
    begins = view.status.phase == "Starting" and not view.status.replacing
    return begins and bool(view.status.pod_group)


gives_a_waiting_group_back = _instead(pod_group, waits=lambda view: False)
waits_for_the_rest_for_ever = _instead(pod_group, waits=_whole_or_not)
replaces_outside_of_the_group = _instead(render, pod=_of_nobody)
keeps_the_group_of_an_ended_attempt = _instead(
    pod_group, of=lambda view, right=pod_group.of: replace(right(view), left_over=False)
)
counts_who_stands_by = _least(lambda spec: spec.standby)
wants_one_too_few = _least(lambda spec: -1)
comes_back_at_once = _instead(pod_group, preempted=lambda *_: False)
makes_no_group = _instead(pod_group, bodies=lambda view: ())


def day(loop: asyncio.AbstractEventLoop, planner: Planner = plan) -> GroupWorld:
    """One day of three jobs in room for four pods; Violation if anything is wrong."""
    world = GroupWorld(loop, fate=lambda *_: None, planner=planner)
    world.holds = True
    _create(world, "a", replicas=2)
    _until_running(world, "a")
    assert world.run(lambda: bool(world.cluster.status("a").get("holds")))
    for pod in world.cluster.pods("a")[:1]:
        world.lose(pod, "delete")
    assert world.run(lambda: world.phase("a") != "Running")
    _until_running(world, "a")
    _create(world, "b", startupDeadlineSeconds=60)
    world.run(lambda: False, 300)  # it waits whole, and a runs
    world.cluster.gang_scheduler = False  # now b is placed one by one, and half of it fits
    world.run(lambda: False, 300)
    world.cluster.gang_scheduler = True
    assert world.run(lambda: bool(world.cluster.status("b").get("podGroup")))
    world.run(lambda: False, 100)
    world.edit("a", suspend=True)
    _until_running(world, "b")
    world.run(lambda: False, 100)
    _create(world, "c", high=True, standby=1)
    _until_running(world, "c")
    world.run(lambda: False, 30)  # a pod that stands by is placed by itself
    world.heal()
    world.must_end()
    return world


def _create(world: GroupWorld, name: str, *, high: bool = False, **spec: Any) -> None:
    world.cluster.create(crd.PLURAL, job_body(name, **spec, **scheduled(high=high)))


def _until_running(world: GroupWorld, name: str) -> None:
    if not world.run(lambda: world.phase(name) == "Running", 900):
        raise Violation("i8_ends", f"{name} does not run: {world.cluster.status(name)}")
