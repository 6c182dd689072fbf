"""Gangs that want more than a quota allows, planned side by side: each must get its turn."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ddpjob_operator.core import actions as act
from support.world import START, World, job_object

STEP = timedelta(seconds=0.5)
#: How long the pods of a gang take to go, so that the places of a release are not free at once.
GRACE = timedelta(seconds=5)


class Yard:
    """Gangs and a quota of pods that all draw on. A pod frees its place when it is gone.

    Creations go out side by side, one pod of each gang in turn, which is the worst for them; what a
    gang has under way ends at its first refusal. ``work``: seconds that each trains.
    """

    def __init__(self, quota: int, sizes: dict[str, int], work: float) -> None:
        self.quota, self.work, self.now = quota, timedelta(seconds=work), START
        self.worlds = {uid: self._world(uid, size) for uid, size in sizes.items()}
        self.ended: dict[str, timedelta] = {}

    def live(self, limit: timedelta) -> dict[str, timedelta]:
        """Until all have succeeded, or for so long; how long each took."""
        while self.now < START + limit and len(self.ended) < len(self.worlds):
            for uid, world in self.worlds.items():
                world.now = self.now
                self._kubelet(uid, world)
            for _ in range(5):  # status, barrier, status, network, pods
                self._operator()
            self.now += STEP
        return self.ended

    def _world(self, uid: str, size: int) -> World:
        job = job_object(replicas=size)
        job["metadata"]["uid"] = uid
        world = World(job, graceful=True)
        world.refuse = lambda _: self._judge(world)
        return world

    def _judge(self, world: World) -> act.Refusal | None:
        if sum(len(each.pods) for each in self.worlds.values()) < self.quota:
            return None
        attempt = world.status["attempt"]
        return act.Refusal(attempt, 403, "Forbidden", "exceeded quota: pods", world.now)

    def _operator(self) -> None:
        plans = {uid: list(world.plan().actions) for uid, world in self.worlds.items()}
        while any(plans.values()):
            for uid, actions in plans.items():
                if actions:
                    self.worlds[uid].carry_out(actions.pop(0))
                    if self.worlds[uid].feedback.refusals:
                        actions.clear()

    def _kubelet(self, uid: str, world: World) -> None:
        for name, pod in list(world.pods.items()):
            since = pod["metadata"].get("deletionTimestamp")
            if since and self.now.isoformat() >= since and self._over(pod):
                del world.pods[name]
        whole = len(world.pods) == world.job["spec"]["replicas"] and not any(
            "deletionTimestamp" in pod["metadata"] for pod in world.pods.values()
        )
        if world.job.get("status", {}).get("phase") == "Succeeded":
            world.pods.clear()
            self.ended.setdefault(uid, self.now - START)
        elif whole:
            self._train(world)

    def _over(self, pod: dict[str, object]) -> bool:
        gone_at = pod.setdefault("goneAt", self.now + GRACE)
        return bool(gone_at <= self.now)  # type: ignore[operator]

    def _train(self, world: World) -> None:
        began = world.pods["job-0"].setdefault("beganAt", self.now)
        for replica in range(len(world.pods)):
            if self.now - began >= self.work:
                world.end(replica, 0, settle=False)
            else:
                world._state(replica, "Running", {"running": {}})


@pytest.mark.parametrize("pair", [("a", "b"), ("c", "d"), ("1f3e", "9b27"), ("x" * 36, "y" * 36)])
@pytest.mark.fault("N9")
def test_two_gangs_that_do_not_fit_together_both_finish(pair: tuple[str, str]):
    """4 and 4 pods on a quota of 6: in step with each other neither ever ran."""
    yard = Yard(6, dict.fromkeys(pair, 4), work=10)
    took = yard.live(timedelta(minutes=30))
    assert set(took) == set(pair)


@pytest.mark.fault("N9")
@pytest.mark.tier("gate")
def test_five_gangs_on_room_for_two_all_finish():
    yard = Yard(5, {f"gang {n}": 2 for n in range(5)}, work=10)
    assert len(yard.live(timedelta(minutes=60))) == 5
