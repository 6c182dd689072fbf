"""A world whose pods hold launchers: operators, kubelets, hubs and links move side by side.

Beside the invariants of every write, those of rounds are held whenever one begins: K1 (a key's
launchers are one list), K2 (a number is
one hub's, by its pod's attempt), K3 (nothing older is alive there), K4 (a launcher's keys grow).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ddpjob_contract import crd
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.status import from_dict
from ddpjob_trainer.launcher.hub.messages import Key
from model.cluster import START, Cluster, Object, deadline
from model.launchers import Launcher
from model.network import Network
from model.operators import Operator
from model.rescues import Rescues
from model.story import World
from support.invariants import Violation
from support.objects import attempt, owner, replica, status, uid_of

NODES = tuple(f"node-{n}" for n in range(4))
VOLUME = {"persistentVolumeClaim": {"claimName": "x"}}
FENCE = {
    "nodeLost": {"policy": "Fence", "afterSeconds": 1},
    "snapshot": {"path": "/snapshots", "volume": VOLUME},
}
RESTART = {
    "maxRestarts": 10_000, "maxDisruptions": 10_000, "replaceSeconds": 120,
    "backoff": {"initialSeconds": 1, "maxSeconds": 10},
}  # fmt: skip
_MOVES = 60_000


class GangWorld(World):
    """``launcher_class``: for wrong launchers. ``rescues``: survivors save the newest step.

    ``least``: replicas of an elastic gang, of which an operator as today knows nothing.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        launcher_class: type[Launcher] = Launcher,
        rescues: bool = False,
        least: int = 0,
        **more: Any,
    ) -> None:
        self.rescues, self.rescued = rescues, Rescues()
        self.launcher_class, self.least = launcher_class, least
        self.launchers: dict[str, Launcher] = {}  # by uid of the pod, those of dead ones too
        self.finishing = False
        self.stale: set[str] = set()  # names that lead to the pod before
        self.began: dict[tuple[str, Key], dict[int, str]] = {}  # job, key -> pods by replica
        self.sizes: dict[tuple[str, Key], int] = {}
        self.numbers: dict[tuple[str, int], str] = {}  # job, number -> pod of the hub
        self.met: list[str] = []  # faults
        self.told: set[str] = set()  # pods that got SIGTERM
        super().__init__(loop, cluster=more.pop("cluster", Cluster(nodes=NODES)), **more)
        self.network = Network(self.seconds)

    def seconds(self) -> float:
        return 100.0 + (self.cluster.now - START).total_seconds()

    # --- What must hold ------------------------------------------------------------------

    def begins(self, launcher: Launcher, key: Key) -> None:
        """A round's worker starts in a launcher."""
        hub = self.launchers.get(launcher.followed, launcher)
        if key.round > 0 or launcher.config.replacement or launcher.replica == 0:
            given = self.numbers.setdefault((launcher.job, key.number), hub.uid)
            if given != hub.uid or key.number != attempt(hub.pod):
                what = f"{hub.uid} of attempt {attempt(hub.pod)} gives out {key}"
                raise Violation("k2_number_of_one_hub", f"{what}; {given} had number {key.number}")
        if self.least:
            self._begins_elastic(launcher, key)
        known = self.began.setdefault((launcher.job, key), {})
        other = known.setdefault(launcher.replica, launcher.uid)
        if other != launcher.uid and self._made_again(launcher, key, other):
            known[launcher.replica] = other = launcher.uid
        if other != launcher.uid:
            what = f"replica {launcher.replica} in {other} and in {launcher.uid}"
            raise Violation("k1_one_list", f"round {key} is given out twice: {what}")
        mine = [k for (_, k), pods in self.began.items() if launcher.uid in pods.values()]
        if max(mine) > key:
            raise Violation("k4_keys_grow", f"{launcher.uid} begins {key} after {max(mine)}")
        for one in {launcher, *launcher.gang}:
            if one.workers.running and (one is launcher or one.workers.key < key):
                older = f"{one.uid} still runs {one.workers.key}"
                raise Violation("k3_all_stand_still", f"{launcher.uid} begins {key}, and {older}")

    def _begins_elastic(self, launcher: Launcher, key: Key) -> None:
        size = self.sizes.setdefault((launcher.job, key), launcher.replicas)
        if size != launcher.replicas:
            raise Violation("k1_one_list", f"round {key} has {size} and {launcher.replicas}")
        if size < self.least:
            raise Violation("e1_least", f"round {key} begins with {size} of {self.least}")
        if launcher.replica >= size:
            raise Violation("e1_ranks", f"replica {launcher.replica} begins in {key}, of {size}")

    def asks(self, launcher: Launcher) -> None:
        """Between two growths lies a snapshot (E5)."""
        if launcher.workers.snapshot_step() < 0:
            raise Violation("e5_progress", f"{launcher.uid} ends {launcher.workers.key} for growth")

    def training(self) -> int:
        """The size of the newest round if all on its list are in it and linked, else 0."""
        (job, key), pods = max(self.began.items(), key=lambda one: one[0][1])
        ones = [self.launchers[uid] for uid in pods.values()]
        in_it = [one for one in ones if one.there and one.workers.key == key]
        return len(pods) if len(in_it) == self.sizes[job, key] else 0

    def must_train(self, size: int, seconds: float = 60) -> None:
        """It steps again, with so many, within that time (E2, E6)."""
        if not self.run(lambda: self.training() == size, seconds):
            raise Violation("e2_trains", f"{self.training()} train, not {size}: {self.told_of()}")

    def _made_again(self, launcher: Launcher, key: Key, other: str) -> bool:
        """While a whole gang starts, the next operator makes again what is missing but the hub.

        A process that lives on without its object was given up by a person.
        """
        gone = not self.launchers[other].alive or other in self.cluster.forced
        began = key.round == 0 and not launcher.config.replacement
        return gone and began and launcher.replica != 0

    def whole(self, name: str = "job") -> Key | None:
        """The round in which every member of the operator's gang is, and linked."""
        job = self.cluster.job(name)
        if job is None:
            return None
        found = [self.launchers.get(uid) for uid in self._members(job).values()]
        # One that has ended with 0 unheard may have a successor among those that stood by.
        there = sorted((one for one in found if one and one.there), key=lambda one: one.alive)
        serving = {one.replica: one.workers.key for one in there}
        keys = set(serving.values())
        if len(serving) == job["spec"]["replicas"] and len(keys) == 1:
            return keys.pop()
        return None

    @property
    def hub_pod(self) -> str:
        """The pod to which the hub's name leads."""
        return self.network.names["job-0.job.ns.svc"]

    def _members(self, job: Object) -> dict[int, str]:
        known = from_dict(status(job))
        return {
            number: uid_of(pod)
            for pod in self.cluster.pods()
            if owner(pod) == uid_of(job)
            and (number := replica(pod)) is not None
            and known.min_attempt(number) <= int(pod["metadata"]["labels"][crd.LABEL_ATTEMPT])
        }

    def must_be_whole(self, seconds: float = 900) -> None:
        """Without faults the gang is in one round, whole or restarted, within that time."""
        if not self.run(lambda: self.over() or self.whole() is not None, seconds):
            raise Violation("h_whole_again", f"no whole gang after {seconds:g} s: {self.told_of()}")

    def must_finish(self) -> None:
        """The whole gang ends well, and the job with it."""
        self.finishing = True
        self.must_end()

    def told_of(self) -> str:
        found = self.cluster.status("job")
        told = {key: found.get(key) for key in ("phase", "attempt", "births", "message")}
        there = {
            f"{one.pod['metadata']['name']}/{uid}": (one.fingerprint()[:2], one.due)
            for uid, one in self.launchers.items()
            if one.alive
        }
        return f"{told} {there}"

    # --- Parties -------------------------------------------------------------------------

    def _move(self) -> bool:
        self.learn()
        for operator in self.operators:
            self.poll(operator)
        return super()._move()

    def learn(self) -> None:
        """Processes and names are those of the machines and the objects."""
        cluster, network = self.cluster, self.network
        for uid, pod in list(cluster.processes.items()):
            if uid not in self.launchers:
                network.hosts[uid] = one = self._launch(pod)
                one.world = self
        for uid, one in self.launchers.items():
            if one.alive and uid not in cluster.processes:
                network.kill(one)
        for pod in cluster.pods():
            name = pod["metadata"]["name"]
            if name not in self.stale and uid_of(pod) in self.launchers:
                network.names[f"{name}.job.ns.svc"] = uid_of(pod)
        network.tick()

    def _launch(self, pod: Object) -> Launcher:
        new = self.launcher_class(self, pod, self.seconds())
        self.launchers[new.uid] = new
        return new

    def poll(self, operator: Operator) -> None:
        """GET /state of the hub, as the operator's poller does while a job runs."""
        for job in list(operator.store.jobs()):
            if job.status.get("phase") != "Running":
                continue
            hub = self.launchers.get(self.network.names.get(f"{job.name}-0.job.ns.svc", ""))
            if hub is None or not hub.alive or hub.stopped or hub.node in self.network.dark:
                continue
            if hub.job != job.uid or hub.node in self.cluster.silent:
                continue
            known, said = operator.store.feedback(job.uid), observe.rounds(hub.said())
            if known.rounds != said:
                operator.store.set_feedback(job.uid, replace(known, rounds=said))
                operator.queue.add(job.key)

    def move_machines(self) -> bool:
        self.learn()
        return (
            any(map(self.step, list(self.launchers.values())))
            or any(map(self.worker_moves, list(self.launchers.values())))
            or self.kubelets_move()
            or (self.cluster.era > 0 and self.cluster.report())
        )

    def step(self, one: Launcher) -> bool:
        """One launcher takes its turn; whether anything came of it."""
        if not one.alive or one.stopped or one.node in self.network.dark:
            return False
        before = (one.fingerprint(), self.network.moves)
        one.step(self.seconds())
        return before != (one.fingerprint(), self.network.moves)

    def worker_moves(self, one: Launcher) -> bool:
        """What was killed ends; so does who has lost a peer, or is done."""
        workers, now = one.workers, self.seconds()
        if not one.alive or not workers.running or one.node in self.network.dark:
            return False
        if workers.killed:
            workers.end(-9, now)
        elif workers.asked:
            workers.end(143, now)
        elif workers.survivor.move(one):
            pass
        elif self._alone(one):
            if self.rescues and workers.survivor.holds(now):
                return False
            workers.end(75, now)
        elif self.finishing and self._may_end(one):
            workers.end(0, now)
        else:
            return False
        return True

    def _peers(self, one: Launcher) -> list[Launcher]:
        pods = self.began[one.job, one.workers.key]
        return [self.launchers[uid] for uid in pods.values() if uid != one.uid]

    def _alone(self, one: Launcher) -> bool:
        """A peer of its round is gone, other than by a success."""
        for other in self._peers(one):
            mine = other.workers.key == one.workers.key
            done = mine and other.workers.succeeded and self.finishing  # else it left too early
            cut = self.least and not self.network.reaches(one, other)
            if cut or (not done and not (mine and other.alive and other.workers.running)):
                return True
        return False

    def _may_end(self, one: Launcher) -> bool:
        peers = self._peers(one)
        whole = len(peers) == one.replicas - 1
        linked = all(p.settled or p.workers.succeeded for p in (one, *peers))
        return whole and linked

    def kubelets_move(self) -> bool:
        """One kubelet that is heard of does one thing."""
        cluster = self.cluster
        for pod in cluster.pods():
            if not cluster.hears(pod) or pod["spec"].get("nodeName") in self.network.dark:
                continue
            one = self.launchers.get(uid_of(pod))
            if one is not None and not one.alive and uid_of(pod) in cluster.processes:
                cluster.finish(pod, one.code)
                return True
            if "deletionTimestamp" in pod["metadata"]:
                until = deadline(pod)
                if one is None or not one.alive or (until and until <= cluster.now):
                    cluster.kill(pod)
                    return True
                if one.uid not in self.told:
                    self.told.add(one.uid)
                    one.terminate()
                    return True
        for pod in cluster.pods():
            if self._can_start(pod) and (self.pulls or not pod["spec"].get("nodeName")):
                (cluster.start if self.pulls else cluster.refuse_image)(self._bound(pod))
                return True
        return False

    def _bound(self, pod: Object) -> Object:
        """A scheduler spreads a gang over the nodes."""
        fitting = self.cluster.fitting(pod)
        node = (
            pod["spec"].get("nodeName")
            or fitting[((replica(pod) or 0) + (attempt(pod) or 0)) % len(fitting)]
        )
        return {**pod, "spec": {**pod["spec"], "nodeName": node}}

    # --- Time ----------------------------------------------------------------------------

    def sleep(self, seconds: float | None = None) -> None:
        """Launchers in trouble look at the clock each second."""
        alive = [one for one in self.launchers.values() if one.alive]
        grows = self.least and any(one.stands_by for one in alive)
        if all(one.settled for one in alive) and not grows:
            super().sleep(seconds)
        elif seconds is None:
            before = self.cluster.now
            super().sleep(None)
            self.cluster.now = min(self.cluster.now, before + timedelta(seconds=1))
        else:
            for _ in range(max(1, round(seconds))):
                super().sleep(min(1.0, seconds))
                for one in list(self.launchers.values()):
                    self.step(one)

    def run(self, until: Callable[[], bool], seconds: float = 7200, limit: int = _MOVES) -> bool:
        return super().run(until, seconds, limit)

    def heal(self) -> None:
        self.network.cuts.clear()
        self.stale.clear()
        for node in sorted(self.network.dark):
            self.power_on(node)
        for one in self.launchers.values():
            one.stopped = False
        super().heal()

    # --- Faults --------------------------------------------------------------------------

    def power_off(self, node: str) -> None:
        """The machine is gone with all that ran on it, and nobody hears a word."""
        self.network.dark.add(node)
        if node not in self.cluster.silent:
            self.cluster.silence(node)
        for one in self.launchers.values():
            if one.node == node:
                one.alive = False

    def power_on(self, node: str) -> None:
        self.network.dark.discard(node)
        if node in self.cluster.silent:
            self.cluster.hear_again(node)

    def kill(self, one: Launcher) -> None:
        """SIGKILL; its kubelet will tell."""
        if one.alive:
            self.network.kill(one)
