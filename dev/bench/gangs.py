"""Gangs of random sizes on a cluster with room for a third of them, under random deletions.

A devcluster with Kubernetes' gang scheduling, the chart as users install it, real trainings of 1 to
4 pods that need 1 or 2 slots each, two priorities. They come at random moments of the first third
of the time; until its end random pods are deleted, one or all of a gang, gently or by force, and
PodGroups. About twice a second all pods and jobs are looked at.

Ends with exit code 1 unless every gang has succeeded with the weights of an undisturbed run, none
was ever placed in parts, and each gang that was placed before an earlier one had a reason for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import report
from harness.gang_order import Gang, Look, Order, Pod, halves, lives

from support.cluster import wait_for
from support.rest import JOBS, Object, Rest, RestError
from support.site import Site, digits, installed, trainer

SLOT = "example.com/slot"
HIGH = "high"
NODES = ("node1", "node2")
STEPS, EVERY = 120, 5
LOOK_SECONDS = 0.5
LARGEST = 4  # pods of a gang
#: In its last steps a gang is left alone: its hash is read from the log of a pod that is there.
SPARED_STEPS = 8
#: What is deleted, and how often.
STRIKES = {
    "a pod": 50,
    "a pod by force": 20,
    "all pods": 10,
    "all pods by force": 5,
    "a PodGroup": 15,
}
PREEMPTED = "PreemptionByScheduler"


def planned(number: int, minutes: float, chance: random.Random) -> list[Gang]:
    """Gangs in the order in which they come; three waves of them take about the whole time."""
    whole = minutes * 60
    moments = sorted(chance.uniform(0, whole / 3) for _ in range(number))
    return [
        Gang(
            name=f"gang-{order:02}",
            replicas=chance.randint(1, LARGEST),
            slots=chance.randint(1, 2),
            priority=1000 if chance.random() < 0.3 else 0,
            at=moment,
            seconds=chance.uniform(0.12, 0.24) * whole,
        )
        for order, moment in enumerate(moments, 1)
    ]


def room(gangs: Sequence[Gang]) -> dict[str, int]:
    """Slots by node: a third of all that are asked for, and room for each gang alone."""
    needs = [gang.need for gang in gangs]
    total = max(-(-sum(needs) // 3), *needs)
    while True:
        nodes = {NODES[0]: -(-total // 2), NODES[1]: total // 2}
        fit = (sum(slots // gang.slots for slots in nodes.values()) for gang in gangs)
        if all(pods >= gang.replicas for pods, gang in zip(fit, gangs, strict=True)):
            return nodes
        total += 1


def prepare(site: Site, nodes: Mapping[str, int]) -> None:
    """Put the slots on the nodes and make the higher priority."""
    for node, slots in nodes.items():
        body = json.dumps({"status": {"capacity": {SLOT: str(slots)}}})
        patch = ("patch", "node", node, "--subresource=status", "--type=merge", "-p", body)
        site.kubectl(*patch, check=True)
        there = lambda n=node, s=slots: (  # noqa: E731
            site.get("node", n)["status"]["allocatable"].get(SLOT) == str(s)
        )
        wait_for(there, f"{slots} slots on {node}")
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    site.apply({**priority, "metadata": {"name": HIGH}})


def undisturbed(site: Site, sizes: Iterable[int]) -> dict[int, str]:
    """The weights' hash of each number of replicas; one after the other, for few cores."""
    hashes = {}
    for size in sorted(set(sizes)):
        name = f"undisturbed-{size}"
        plain = digits(name, steps=STEPS, step_seconds=0, every=EVERY, replicas=size)
        site.apply(lean(plain))
        site.wait_phase(name, "Succeeded")
        hashes[size] = site.result(name)["weights_sha256"]
        site.delete(name)
        print(f"undisturbed, pods: {size}, hash: {hashes[size]}", flush=True)
    return hashes


def body(gang: Gang, *, native: bool) -> Object:
    scheduling = {"priorityClassName": HIGH} if gang.priority else {}
    found = digits(
        gang.name,
        steps=STEPS,
        step_seconds=gang.seconds / STEPS,
        every=EVERY,
        replicas=gang.replicas,
        restart={"maxRestarts": 20},
        scheduling=scheduling if native else {**scheduling, "gang": "None"},
        **({} if native else {"startupDeadlineSeconds": 60}),  # halves block each other till then
    )
    trainer(found)["resources"] = {"limits": {SLOT: str(gang.slots)}}
    return lean(found)


def lean(body: Object) -> Object:
    """The job without spare processes, which would have each pod import torch once more."""
    trainer(body)["command"][2:2] = ["--spares", "0"]  # of `ddpjob-trainer run`
    return body


@dataclass
class Play:
    """What happens in the cluster, as it happens; seconds count from its beginning."""

    site: Site
    gangs: dict[str, Gang]
    chance: random.Random
    native: bool
    began: float = field(default_factory=time.monotonic)
    looks: list[Look] = field(default_factory=list)
    statuses: dict[str, Object] = field(default_factory=dict)  # of the last look
    applied: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    strikes: list[dict[str, Any]] = field(default_factory=list)
    preempted: dict[str, set[tuple[Any, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rest = Rest(self.site.cluster.kubeconfig)
        space = self.site.namespace
        self._pods = f"/api/v1/namespaces/{space}/pods"
        self._jobs = f"{JOBS}/namespaces/{space}/ddpjobs"
        self._groups = f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{space}/podgroups"

    def now(self) -> float:
        return time.monotonic() - self.began

    def run(self, seconds: float, between: float, limit: float) -> None:
        """Apply, look and strike until all have ended, or the limit is over."""
        due = sorted(self.gangs.values(), key=lambda gang: gang.at)
        strike_at = self.chance.expovariate(1 / between)
        while (due or len(self.ended) < len(self.gangs)) and self.now() < limit:
            while due and due[0].at <= self.now():
                gang = due.pop(0)
                self._rest.post(self._jobs, body(gang, native=self.native))
                self.applied[gang.name] = self.now()
                print(f"{self.now():7.1f} s  {gang.name} applied: {_size(gang)}", flush=True)
            self.look()
            if strike_at <= self.now() < seconds and self._strike():
                strike_at = self.now() + self.chance.expovariate(1 / between)
            time.sleep(LOOK_SECONDS)  # looks are spaced by it
        self.look()

    def look(self) -> None:
        at = self.now()
        pods = [_pod(one) for one in self._rest.items(self._pods)]
        jobs = self._rest.items(self._jobs)
        self.statuses = {job["metadata"]["name"]: job.get("status", {}) for job in jobs}
        since = {name: one.get("membersSince", 0) for name, one in self.statuses.items()}
        self.looks.append(Look(at, tuple(pod for pod in pods if pod.gang in self.gangs), since))
        for name, status in self.statuses.items():
            phase = status.get("phase")
            if phase in ("Succeeded", "Failed") and name not in self.ended:
                self.ended[name] = at
                print(f"{at:7.1f} s  {name} {phase}, attempt {status['attempt']}", flush=True)
            for failure in status.get("failures", []):
                if failure.get("reason") == PREEMPTED:
                    found = (failure.get("attempt"), failure.get("detectedAt"))
                    self.preempted.setdefault(name, set()).add(found)

    def _strike(self) -> bool:
        """Delete something of a gang, if there is any to be struck; tell whether it was done."""
        (kind,) = self.chance.choices(list(STRIKES), list(STRIKES.values()))
        look = self.looks[-1]
        if kind == "a PodGroup":
            some = sorted(
                (n, one["podGroup"]) for n, one in self.statuses.items() if "podGroup" in one
            )
            victims = [self.chance.choice(some)] if some else []
        else:
            running = sorted(name for name, one in self.statuses.items() if _trains(one))
            name = self.chance.choice(running) if running else ""
            all_of = sorted(f"{name}-{pod.replica}" for pod in look.of(name) if pod.holds)
            chosen = all_of if "all" in kind else self.chance.sample(all_of, min(1, len(all_of)))
            victims = [(name, one) for one in chosen]
        at = self.now()
        for _, one in victims:
            path = self._groups if kind == "a PodGroup" else self._pods
            with contextlib.suppress(RestError):  # it went by itself
                self._rest.delete(f"{path}/{one}", grace=0 if "by force" in kind else None)
        if victims:
            hit = [one for _, one in victims]
            self.strikes.append({"at": at, "kind": kind, "gang": victims[0][0], "deleted": hit})
            print(f"{at:7.1f} s  deleted {kind}: {', '.join(hit)}", flush=True)
        return bool(victims)


def _trains(status: Object) -> bool:
    step = status.get("progress", {}).get("step", 0)
    return status.get("phase") == "Running" and step < STEPS - SPARED_STEPS


def _pod(raw: Object) -> Pod:
    labels, spec, status = raw["metadata"].get("labels", {}), raw["spec"], raw["status"]
    return Pod(
        gang=labels.get("ddpjob.dev/job-name", ""),
        uid=raw["metadata"]["uid"],
        replica=int(labels.get("ddpjob.dev/replica", 0)),
        attempt=int(labels.get("ddpjob.dev/attempt", 0)),
        node=spec.get("nodeName", ""),
        nominated=status.get("nominatedNodeName", ""),
        phase=status.get("phase", ""),
    )


def _size(gang: Gang) -> str:
    return f"{gang.replicas} x {gang.slots}{', high' if gang.priority else ''}"


def hash_of(site: Site, name: str) -> str:
    try:
        return site.result(name).get("weights_sha256", "")
    except AssertionError as error:
        print(f"no log of {name}: {error}")
        return ""


def judged(play: Play, order: Order, gang: Gang, wanted: str) -> dict[str, Any]:
    """Everything of one gang."""
    status = play.statuses.get(gang.name, {})
    number = order.placed[gang.name]
    applied = play.applied.get(gang.name)
    first = None if number is None else play.looks[number].at
    ended = play.ended.get(gang.name)
    succeeded = status.get("phase") == "Succeeded"
    return {
        **dataclasses.asdict(gang),
        "applied": applied,
        "placed": first,
        "waited": None if first is None or applied is None else first - applied,
        "ended": ended,
        "phase": status.get("phase"),
        "attempts": status.get("attempt"),
        "restarts": status.get("restarts"),
        "preempted": len(play.preempted.get(gang.name, ())),
        "struck": dict(Counter(s["kind"] for s in play.strikes if s["gang"] == gang.name)),
        "halves": halves(gang, play.looks),
        "equal": succeeded and hash_of(play.site, gang.name) == wanted,
    }


def findings(gangs: list[dict[str, Any]], order: Order, part_seconds: float) -> list[str]:
    """Each thing that should not have been."""
    found = []
    for one in gangs:
        if one["phase"] != "Succeeded":
            found.append(f"{one['name']} is {one['phase']}, not Succeeded")
        elif not one["equal"]:
            found.append(f"{one['name']}: the hash is not that of an undisturbed run, or missing")
        found += [
            f"{one['name']}: only some pods of attempt {attempt} had nodes for {seconds:.1f} s"
            f" from {since:.1f} s on"
            for attempt, since, seconds in one["halves"]
            if seconds > part_seconds
        ]
    found += [
        f"{one.later} was placed at {one.at:.1f} s before {one.earlier}: {one.reason}"
        for one in order.inversions()
        if not one.explained
    ]
    return found


def show(gangs: list[dict[str, Any]], order: Order) -> None:
    seconds: Callable[[float | None], str] = lambda v: "-" if v is None else f"{v:.0f}"  # noqa: E731
    header = ("gang", "pods x slots", "priority", "applied s", "waited s", "ended s", "attempts")
    header += ("charged", "preempted", "struck", "in parts s", "phase", "hash")
    rows = [
        [
            one["name"],
            f"{one['replicas']} x {one['slots']}",
            one["priority"],
            *(seconds(one[when]) for when in ("applied", "waited", "ended")),
            one["attempts"],
            (one["restarts"] or {}).get("charged"),
            one["preempted"],
            sum(one["struck"].values()),
            f"{max((part[2] for part in one['halves']), default=0.0):.1f}",
            one["phase"],
            "equal" if one["equal"] else "DIFFERENT",
        ]
        for one in gangs
    ]
    print("\n" + report.table(header, rows))
    found = [
        [f"{one.at:.1f}", one.later, one.earlier, f"{one.free} of {one.need}", one.reason]
        for one in order.inversions()
    ]
    print(f"\n{len(found)} times a gang was placed before an earlier one of no lower priority:")
    print(report.table(("at s", "placed", "waits", "slots free", "why"), found))


def main() -> int:
    parser = report.options((__doc__ or "").splitlines()[0])
    parser.add_argument("--gangs", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=30, help="of deletions (30)")
    parser.add_argument("--between", type=float, default=25, help="seconds between them (25)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part-seconds", type=float, default=5, help="that a start may take (5)")
    parser.add_argument("--plain", action="store_true", help="pods placed one by one, to compare")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster must go all the same
    facts = report.machine()
    number, minutes = (5, 3.0) if args.quick else (args.gangs, args.minutes)
    chance = random.Random(args.seed)
    gangs = planned(number, minutes, chance)
    nodes = room(gangs)
    asked = sum(gang.need for gang in gangs)
    print(f"seed {args.seed}: {number} gangs ask for {asked} slots, there are {nodes}", flush=True)
    name = os.environ.get("BENCH_CLUSTER") or f"bench-{os.getpid()}"
    with installed(name, "--gang-scheduling") as site:
        prepare(site, nodes)
        wanted = undisturbed(site, (gang.replicas for gang in gangs))
        play = Play(site, {gang.name: gang for gang in gangs}, chance, not args.plain)
        play.run(minutes * 60, args.between, limit=minutes * 120 + 600)
        order = Order(gangs, play.applied, nodes, play.looks)
        rows = [judged(play, order, gang, wanted[gang.replicas]) for gang in gangs]
        for one in rows:
            if one["phase"] != "Succeeded":
                print(site.explain(one["name"]))
    show(rows, order)
    found = findings(rows, order, args.part_seconds)
    most = max(sum(pod.holds for pod in look.pods) for look in play.looks)
    gap = max(b.at - a.at for a, b in zip(play.looks, play.looks[1:], strict=False))
    print(
        f"\n{len(play.strikes)} deletions in {play.looks[-1].at:.0f} s; {most} pods at most at once"
    )
    print(f"{len(play.looks)} looks, the longest gap {gap:.1f} s")
    print("\n".join(["", *(f"FINDING: {one}" for one in found)]) if found else "no findings")
    result = {
        "seed": args.seed,
        "plain": args.plain,
        "minutes": minutes,
        "nodes": nodes,
        "gangs": rows,
        "strikes": play.strikes,
        "inversions": [dataclasses.asdict(one) for one in order.inversions()],
        "findings": found,
        "lives": lives(play.looks),
    }
    report.finish("gangs", facts, result, args.json)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
