"""A world of jobs, operators and machines that moves in small steps, fair or disturbed.

``tick`` is one move of one party, always in the same order, so that a story is a number of
ticks and every fault has a place in it. Every write is held against the invariants at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import ddpjob_contract as contract
from ddpjob_contract import crd
from ddpjob_operator.core.objects import compact_spec
from ddpjob_operator.core.plan import plan as real_plan
from model.cluster import NAMESPACE, Cluster, Object, deadline
from model.operators import RELIST, RESYNC, Operator, Planner
from model.scheduler import Scheduler
from model.wire import Wire
from support.invariants import State, Violation, at_rest, check, gang_of, i19_explained
from support.objects import attempt, labels, owner, replica, status, uid_of
from support.world import job_object

WATCHED = (crd.PLURAL, "pods", "nodes", "workloads")
#: Nobody may be silent for longer.
PATIENCE = timedelta(seconds=60)
#: Of a restart's waits.
LONGEST_WAIT = timedelta(minutes=10)
#: What becomes of a replica of an attempt while its gang runs: an exit code, or None: it goes on.
Fate = Callable[[str, int, int], int | None]


def job_body(name: str = "job", **spec: Any) -> dict[str, Any]:
    """A DDPJob of 3 replicas as its user writes it; see support.world.job_object."""
    return {**job_object(**spec), "metadata": {"namespace": NAMESPACE, "name": name}}


def finishes(job: str, attempt: int, replica: int) -> int | None:
    """Every gang that runs ends well."""
    return 0


def loses_one() -> Fate:
    """The fate of the reference trace: replica 1 of the first gang fails, then all is well."""
    first: list[int] = []

    def fate(job: str, attempt: int, replica: int) -> int | None:
        first.append(attempt)
        if attempt == first[0]:
            return 1 if replica == 1 else None
        return 0

    return fate


class World:
    """``operators`` all act unless they do not lead. ``fate`` decides how pods end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        fate: Fate = finishes,
        planner: Planner = real_plan,
        cluster: Cluster | None = None,
    ) -> None:
        self.loop, self.fate, self.planner = loop, fate, planner
        self.cluster = cluster or Cluster()
        self.wire = Wire(self.cluster)
        self.scheduler = Scheduler(self.cluster)
        self.operators: list[Operator] = []
        self.state = State()
        self.checked = 0
        self.ticks = 0
        self.frozen: set[tuple[str, str]] = set()  # watches that deliver nothing
        self.pulls = True  # images can be pulled: pods start
        self.holds = False  # launchers say that they wait for a lost one's replacement
        self._era = 0
        self._skewed_at = self.cluster.now - LONGEST_WAIT - PATIENCE
        self.named = 0
        #: What is to happen at a tick, or at a time.
        self.timers: list[tuple[int | None, datetime | None, Callable[[], object]]] = []
        self.start_operator()

    # --- parties ---

    def start_operator(self, behind: int = 0, pods_behind: int | None = None) -> Operator:
        """One more process, or the next one."""
        self.named += 1
        name = f"operator-{self.named}"
        new = Operator(self.wire, name, self.loop, self.planner, behind, pods_behind)
        self.operators.append(new)
        return new

    def restart(
        self, operator: Operator, behind: int = 0, pods_behind: int | None = None
    ) -> Operator:
        """It dies, another comes up; what was delivered and learnt is lost."""
        operator.dead = True
        self.bury()
        return self.start_operator(behind, pods_behind)

    def bury(self) -> bool:
        """Take dead processes away."""
        dead = [o for o in self.operators if o.dead]
        self.operators = [o for o in self.operators if not o.dead]
        for operator in dead:
            if operator.task is not None:
                operator.task.cancel()
        return bool(dead)

    @property
    def operator(self) -> Operator:
        return self.operators[-1]

    # --- time ---

    def verify(self) -> None:
        """Hold what was written since the last time against the invariants."""
        if self.cluster.era != self._era:
            self._era = self.cluster.era
            as_made = {uid_of(pod) for pod in self.cluster.pods() if _as_made(pod)}
            kept = {"late": self.state.late, "tampered": self.state.tampered - as_made}
            self.state, self.checked = State(deposed=True, **kept), 0
        self.state = check(self.cluster.history[self.checked :], self.state)
        self.checked = len(self.cluster.history)
        self._verify_processes()

    def _verify_processes(self) -> None:
        """What runs on the machines, whatever the objects say; forced ones are the user's."""
        by_job: dict[str | None, set[int | None]] = {}
        for uid, pod in self.cluster.processes.items():
            if uid not in self.cluster.forced | self.state.late:
                by_job.setdefault(owner(pod), set()).add(gang_of(self.state, pod))
        for gangs in by_job.values():
            if len(gangs) > 1:
                what = f"processes of gangs of {sorted(map(str, gangs))} run side by side"
                raise Violation("i1_processes", what)

    def tick(self) -> bool:
        """One fair move. False if nothing but time can bring news."""
        self.ticks += 1
        moved = self._move()
        self.verify()
        return moved

    def _move(self) -> bool:
        if self.bury() and not self.operators:
            self.start_operator()
            return True
        for operator in self.operators:
            for plural in WATCHED:
                if (operator.name, plural) not in self.frozen:
                    operator.deliver(plural)
            if not operator.dead:
                self._periodic(operator)
                if self.holds:
                    operator.hear_launchers()
        if self.bury():
            return True
        if any(operator.work() for operator in self.operators):
            return True
        # A process outlives its object for as long as it can.
        machines = self.cluster.collect() or self.move_machines() or self.cluster.reap()
        return machines or self.scheduler.move()

    def _periodic(self, operator: Operator) -> None:
        if self.cluster.now - operator.discovered_at >= RESYNC:
            operator.discover()
        jobs, pods = ((operator.name, plural) in self.frozen for plural in WATCHED[:2])
        if not jobs and self.cluster.now - operator.resynced_at >= RESYNC:
            operator.resync()
        if not pods and self.cluster.now - operator.relisted_at >= RELIST:
            operator.relist()

    def freeze(
        self, *operators: Operator, plurals: tuple[str, ...] = WATCHED
    ) -> Callable[[], None]:
        """Their watches fall silent; call what is returned to end it."""
        watches = {(operator.name, plural) for operator in operators for plural in plurals}
        self.frozen |= watches
        return lambda: self.frozen.difference_update(watches)

    def move_machines(self) -> bool:
        """One kubelet does one thing."""
        if self.cluster.era and self.cluster.report():
            return True
        for pod in self.cluster.pods():
            if "deletionTimestamp" in pod["metadata"] and self.cluster.hears(pod):
                self.cluster.kill(pod)
                return True
        for pod in self.cluster.pods():
            if self._can_start(pod) and (self.pulls or not pod["spec"].get("nodeName")):
                (self.cluster.start if self.pulls else self.cluster.refuse_image)(pod)
                return True
        return any(self._end_one(job) for job in self.cluster.jobs())

    def _can_start(self, pod: Object) -> bool:
        fresh = pod["status"].get("phase") == "Pending" and self.cluster.hears(pod)
        room = pod["spec"].get("nodeName")
        if self.cluster.rooms is None:
            room = room or self.cluster.fitting(pod)
        return fresh and bool(room) and "deletionTimestamp" not in pod["metadata"]

    def _end_one(self, job: Object) -> bool:
        found, name = status(job), job["metadata"]["name"]
        if found.get("phase") != "Running":
            return False
        for pod in self.cluster.pods(name):
            code = self.fate(name, attempt(pod) or 0, replica(pod) or 0)
            if code is not None and self.cluster.runs(pod) and self.cluster.hears(pod):
                self.cluster.finish(pod, code)
                return True
        return False

    def sleep(self, seconds: float | None = None) -> None:
        """Let time pass: so much, or until somebody's timer rings."""
        self._verify_silence()
        now = self.cluster.now
        if seconds is not None:
            self.cluster.now = now + timedelta(seconds=seconds)
            return
        watched = [o for o in self.operators if (o.name, crd.PLURAL) not in self.frozen]
        times: list[datetime] = [o.resynced_at + RESYNC for o in watched]
        times += [at for o in self.operators for at in o.queue.due.values()]
        times += [at for _, at, _ in self.timers if at is not None]
        times += [at for pod in self.cluster.pods() if (at := deadline(pod)) is not None]
        later = [at for at in times if at > now]
        self.cluster.now = min(later, default=now + RESYNC)

    def _verify_silence(self) -> None:
        """Whoever waits for long, undisturbed, has said for what."""
        last = self.cluster.history[-1].at
        quiet = last is not None and self.cluster.now - last > PATIENCE
        if any(o.skew for o in self.operators):
            self._skewed_at = self.cluster.now
        # One that has just started, or after a long sleep, has had no turn yet.
        sane = all(o.at_rest for o in self.operators)
        # Times that were written by another clock are wrong for as long as a wait may last.
        sane &= self.cluster.now - self._skewed_at > LONGEST_WAIT
        if quiet and sane and self.operators and not self.frozen:
            for job in self.state.jobs.values():
                wrong = i19_explained(self.state, job, self.cluster.now)
                if wrong is not None:
                    raise Violation("i19_explained", wrong)

    def run(self, until: Callable[[], bool], seconds: float = 7200, limit: int = 3000) -> bool:
        """Fair moves until something holds; False if it does not within that time."""
        end = self.cluster.now + timedelta(seconds=seconds)
        for _ in range(limit):
            if until():
                return True
            if not self.tick():
                if self.cluster.now >= end:
                    return False
                self.sleep()
        raise Violation("i15_quiescence", f"no rest after {limit} moves")

    # --- ends ---

    def phase(self, name: str = "job") -> str | None:
        found: str | None = self.cluster.status(name).get("phase")
        return found

    def heal(self) -> None:
        """No more faults: machines answer, nothing is refused, one operator with true views."""
        self.wire.gate = lambda call: ""
        for operator in self.operators:
            if operator.task is not None:
                operator.leading = False
                operator.release()
                operator.dead = True
        self.wire.deliver_late()
        self.cluster.refuse = lambda body: None
        self.cluster.quota = None
        self.cluster.heal_nodes()
        self.pulls = True
        self.frozen.clear()
        self.timers.clear()
        self.fate = finishes
        for operator in self.operators[:-1]:
            operator.dead = True
        self.bury()
        if not self.operators:
            self.start_operator()
        self.operator.skew = timedelta()
        self.operator.leading = True
        for job in self.cluster.jobs():
            if job["spec"].get("suspend"):
                self.edit(job["metadata"]["name"], suspend=False)

    def must_end(self, seconds: float = 14400) -> None:
        """A fair, faultless continuation brings every job to its end, and then to rest.

        Only what the status asks of the user is done by the user.
        """
        if not self.run(self._all_over_or_asking, seconds):
            self._raise_no_end(seconds)
        for job in self.cluster.jobs():
            if _asks(job):
                name = job["metadata"]["name"]
                self.edit(name, suspend=True)
                self.run(lambda name=name: self.phase(name) == "Suspended" or self.over(name), 600)
                self.edit(name, suspend=False)
        if not self.run(self._all_over, seconds):
            self._raise_no_end(seconds)
        self.must_rest()

    def edit(self, name: str, **fields: Any) -> None:
        """The user sets fields of the spec, unless the job is over."""
        job = self.cluster.job(name)
        if job is not None and not self.over(name):
            self.cluster.update(crd.PLURAL, name, spec={**job["spec"], **fields})

    def lose(self, pod: Object, how: str) -> None:
        """Somebody removes it, or its program ends with that code."""
        if how == "delete":
            self.cluster.delete("pods", pod["metadata"]["name"])
        elif how == "force":
            self.cluster.force(pod)
        elif how == "evict":
            self.cluster.disrupt(pod, "EvictionByEvictionAPI")
        elif how == "preempt":
            self.cluster.disrupt(pod, "PreemptionByScheduler")
        elif self.cluster.runs(pod):
            self.cluster.finish(pod, int(how))

    def relabel(self, pod: Object, key: str, value: str | None) -> None:
        """Somebody writes a label of ours, or takes it off: what runs there is theirs now."""
        labels = {k: v for k, v in pod["metadata"]["labels"].items() if k != key}
        labels |= {} if value is None else {key: value}
        meta = {**pod["metadata"], "labels": labels}
        self.cluster.forced.add(pod["metadata"]["uid"])
        self.cluster.update("pods", pod["metadata"]["name"], metadata=meta)

    def _raise_no_end(self, seconds: float) -> None:
        keys = ("phase", "attempt", "ready", "restarts", "reason", "message")
        left = [{key: status(job).get(key) for key in keys} for job in self.cluster.jobs()]
        raise Violation("i8_ends", f"no end after {seconds:g} s without a fault: {left}")

    def must_rest(self) -> None:
        """Nothing moves, what is seen is true and explained, and no look writes anything."""
        self.run(lambda: False, seconds=90)
        for name, what in at_rest(self.state, self.cluster.now):
            raise Violation(name, what)
        before = len(self.wire.calls)
        for operator in self.operators:
            operator.resync()
            while operator.work():
                pass
        extra = [call for call in self.wire.calls[before:] if call.writes]
        if extra:
            raise Violation("i15_quiescence", f"at rest, and yet: {extra[0]}")

    def _all_over(self) -> bool:
        return all(self.over(job["metadata"]["name"]) for job in self.cluster.jobs())

    def _all_over_or_asking(self) -> bool:
        return all(self.over(j["metadata"]["name"]) or _asks(j) for j in self.cluster.jobs())

    def over(self, name: str = "job") -> bool:
        """Terminal, or gone."""
        job = self.cluster.job(name)
        return job is None or status(job).get("phase") in ("Succeeded", "Failed")


def _as_made(pod: Object) -> bool:
    """Its labels are those that it was made with, perhaps again."""
    env = compact_spec.trainer_container(pod["spec"]).get("env") or ()
    told = {one["name"]: one.get("value") for one in env}
    made = (told.get(contract.ATTEMPT), told.get(contract.UID))
    return made == (labels(pod).get(crd.LABEL_ATTEMPT), labels(pod).get(crd.LABEL_JOB_UID))


def _asks(job: Object) -> bool:
    """It waits for the user, and says so."""
    told = status(job).get("conditions") or ()
    return any((c["status"], c["reason"]) == ("True", "TemplateChanged") for c in told)
