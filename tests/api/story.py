"""The story that every plan disturbs, and what must be true of it however it was disturbed.

A job of three replicas runs, replica 1 fails once, the gang comes back and succeeds, its pods are
removed and then the job itself. The hand kubelet acts as the store tells, a dead operator is
started again as a kubelet would do it, and all that happens is held against the invariants.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from api.roles import happening, role
from ddpjob_contract import crd
from support import invariants
from support.arena import Arena
from support.objects import attempt, ended, name, status, trainer_state
from support.patience import PATIENCE
from support.pods import gone
from support.proxy import Call
from support.rest import Object, RestError, eventually

JOB = "job"
REPLICAS = 3
SPEC = {"replicas": REPLICAS, "cleanPodPolicy": "All", "ttlSecondsAfterFinished": 1}
#: Nobody answers for progress here, and no lease is lost because nothing ran for a minute.
QUIET = ("--progress-seconds", "60", "--lease-seconds", "120")
_LOOK = 0.05
_PAUSE = 0.3  # seconds between looks at which nothing was told
_TAKEN_BACK = 16  # writes at most to a gang that is well, by operators whose view is old yet


@dataclass
class Outcome:
    """What must be true at the end; a fault that more than the operator sees says otherwise."""

    deaths: int = 0  # of the operator, at most
    again: float = math.inf  # so many pods may be deleted twice
    extra: int = 16  # writes more than undisturbed, tries that failed included


@dataclass
class Play:
    """One run of the story. ``at`` names a write, ``do`` is called when it is about to happen."""

    stage: Arena
    outcome: Outcome = field(default_factory=Outcome)
    moments: dict[str, Callable[[], None]] = field(default_factory=dict)
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    armed: list[Callable[[], object]] = field(default_factory=list)  # true once it has struck
    flags: tuple[str, ...] = ()  # of the operator
    eager: bool = False  # the job is there before the operator watches
    deaths: int = 0
    first: int = 0  # the attempt of the gang that ran first
    seen: list[str] = field(default_factory=list)  # roles and happenings, in their order
    last: Object = field(default_factory=dict)  # the status that was told last
    idle: list[str] = field(default_factory=list)  # writes of an operator that had nothing to do
    _news: threading.Event = field(default_factory=threading.Event)
    finished: set[str] = field(default_factory=set)  # uids of pods that the kubelet ended

    def __post_init__(self) -> None:
        self.stage.proxy.notice = self._notice
        self.stage.history.listeners.append(self._on_event)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Call it in so many seconds, on the story's own thread."""
        self.timers.append((time.monotonic() + seconds, do))

    def role(self, call: Call) -> str:
        return role(call, self.stage.proxy.made)

    def run(self) -> Play:
        """Play it to its end and judge it; raises AssertionError."""
        self._start()
        if not self.eager:
            eventually("the operator watches", self._watched, PATIENCE)
        self.stage.rest.post(self.stage.job_path(), self.stage.job(JOB, **SPEC))
        deadline = time.monotonic() + PATIENCE
        try:
            while not self._over():
                assert time.monotonic() < deadline, "the story does not come to its end" + (
                    "" if self._struck() else ", or the plan's fault met nothing"
                )
                self._tend()
                self._act()
                self._news.wait(_PAUSE)
                self._news.clear()
            self.stage.proxy.release()
            self.stage.verify()
            self._judge()
        except AssertionError as error:
            logs = "\n".join(o.log_path.read_text() for o in self.stage.operators)
            told = f"{error}\nstatus {self.last}\n{' '.join(self.seen)}\n{logs}"
            raise AssertionError(told) from None
        return self

    def _start(self) -> None:
        made = (self.stage.operators or [self.stage.operator(*QUIET, *self.flags)])[0].start()
        self.stage.proxy.kill = made.kill

    def _watched(self) -> bool:
        paths = (self.stage.job_path(), self.stage.path("pods"))
        open_now = {call.path for call in self.stage.proxy.calls if call.watches}
        return open_now.issuperset(paths)

    # --- what the world does ---

    def _tend(self) -> None:
        """Start who is dead, do what is due."""
        self._revive()
        due = [one for one in self.timers if one[0] <= time.monotonic()]
        self.timers = [one for one in self.timers if one not in due]
        for _, do in due:
            do()

    def _revive(self) -> None:
        for operator in self.stage.operators:
            if operator.process and operator.process.poll() is not None:
                self.deaths += 1
                operator.start()

    def _act(self) -> None:
        """Once a gang runs and all is at rest, its pods end: one badly the first time."""
        job = self.stage.history.latest(crd.PLURAL, JOB)
        if not job or status(job).get("phase") != "Running":
            return
        number = status(job).get("attempt")
        pods = [p for p in self._pods() if attempt(p) == number]
        if len(pods) != REPLICAS or not all("running" in trainer_state(p) for p in pods):
            return
        state = self.stage.history.verify()
        if [*invariants.at_rest(state, datetime.now(UTC))]:
            return
        self.first = self.first or number
        if number == self.first:
            self._end(pods[1], 1)
            return
        if not self.timers:
            self._watch_idle()
        for pod in pods:
            self._end(pod, 0)

    def _watch_idle(self) -> None:
        """Let the operator look twice at a gang that is well.

        One whose view is old yet may tell of that and take it back first.
        """
        end = time.monotonic() + PATIENCE
        path = self.stage.job_path()
        before, wrote = len(self.stage.proxy.calls), list[str]()
        while not self.timers and len(wrote) <= _TAKEN_BACK:
            assert time.monotonic() < end, "no operator looks at the gang"
            time.sleep(_LOOK)
            self._revive()
            calls = self.stage.proxy.calls[before:]
            if writes := [c.target for c in calls if c.is_write]:
                before, wrote = before + len(calls), wrote + writes
            elif sum(c.path == path and not c.watches and c.code == 200 for c in calls) >= 2:
                return
        self.idle = wrote[_TAKEN_BACK:]

    def _end(self, pod: Object, code: int) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self.finished:
            return
        self.finished.add(uid)
        try:
            self.stage.kubelet.finish(name(pod), code, "boom" if code else "", uid=uid)
        except RestError as error:
            if not gone(error):
                raise
            # Who removed it meanwhile was first: a fault of the plan, or an operator that is wrong.

    def _pods(self) -> list[Object]:
        found = self.stage.history.all(invariants.PODS)
        return sorted((p for p in found if not ended(p)), key=name)

    def _over(self) -> bool:
        gone = not self.stage.history.latest(crd.PLURAL, JOB)
        done = self.last.get("phase") in ("Succeeded", "Failed")
        # A new operator may be done with the job before kopf has even made its first list.
        return gone and done and not self._pods() and not self.timers and self._struck()

    def _struck(self) -> bool:
        return all(struck() for struck in self.armed)

    # --- what is seen of it ---

    def _notice(self, call: Call) -> None:
        found = self.role(call)
        if found:
            self.seen.append(found)
            do = self.moments.pop(found, None)
            if do is not None:
                do()

    def _on_event(self, plural: str, kind: str, obj: Object) -> None:
        self._news.set()
        if plural == crd.PLURAL and obj.get("status"):
            self.last = obj["status"]

    # --- what must be true ---

    def _judge(self) -> None:
        assert not self.moments, f"the story never came to {[*self.moments]}"
        logs = "".join(o.log_path.read_text() for o in self.stage.operators)
        assert "Traceback" not in logs, "the operator has a bug"
        assert self.deaths <= self.outcome.deaths, f"the operator died {self.deaths} times"
        assert not self.idle, f"a gang that is well was written to: {self.idle}"
        assert not self.stage.kubelet.trouble[3:], self.stage.kubelet.trouble
        last = self.last
        assert (last["phase"], last["succeededReplicas"]) == ("Succeeded", f"0-{REPLICAS - 1}")
        counts = (last["restarts"]["total"], last["restarts"]["charged"], last["attempt"])
        # Who follows an operator that died before the hub's pod was there takes another attempt.
        assert counts[:2] == (1, 1), f"counted {counts}"
        assert 2 <= counts[2] <= 2 + self.deaths, f"counted {counts}"
        assert len(last["failures"]) == 1
        self._judge_writes()

    def _judge_writes(self) -> None:
        made = Counter(self.role(call) for call in self.stage.proxy.made if call.agent != "held up")
        twice = [one for one, count in made.items() if one.startswith("create-pod") and count > 1]
        assert not twice, f"created more than once: {twice}"
        again = [one for one, count in made.items() if one.startswith("delete-pod") and count > 1]
        assert len(again) <= self.outcome.again, f"deleted more than once: {again}"
        tries = [call for call in self.stage.proxy.calls if call.is_write]
        assert len(tries) <= UNDISTURBED + self.outcome.extra, f"{len(tries)} writes"


#: Writes of the story that nothing disturbs; counts of ready pods may add some.
UNDISTURBED = 30


def happenings(play: Play) -> list[str]:
    """The events of the store in their order, by name."""
    writes = [told.write for told in play.stage.history.events()]
    return [found for w in writes if (found := happening(w.kind, w.obj))]
