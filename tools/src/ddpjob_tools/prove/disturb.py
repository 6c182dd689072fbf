"""Make the kills, and check that training comes back after each.

chaos calls run(). One thread looks at the records every few milliseconds. It starts an ended
launcher again as the operator would: same job, next attempt.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ddpjob_contract as contract
from ddpjob_tools.prove.kill import LAUNCHER, Kill
from ddpjob_tools.prove.record import Incarnation, Records, open_gate, process_state
from ddpjob_tools.prove.run import TRACE_FILE, ProofError, Run
from ddpjob_trainer import failpoints, trace
from ddpjob_trainer.failpoints import GATE, OPEN
from ddpjob_trainer.launcher.processes import children

_LOOK_SECONDS = 0.003
_STUCK_SECONDS = 2.0
_USELESS_LAUNCHES = 4
_SHORTEST_PAUSE = 0.1
_STOP_STEPS = 3  # a gang may still make these after SIGTERM, and one for the gate

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """The undisturbed run's speed in seconds, and its steps."""

    total_steps: int
    epoch: int
    every: int
    step_seconds: float
    start_seconds: float


@dataclass(slots=True)
class Made:
    """A kill that was made, and its outcome."""

    kill: Kill
    at: float  # monotonic seconds
    attempt: int
    incarnation: Incarnation
    events: list[int]  # of each rank, before it
    pid: int
    note: str = ""
    how: str = ""
    seconds: float = 0.0
    done: int = 0  # steps finished before it, by the rank that was ahead


@dataclass(slots=True)
class Disturbance:
    """One disturbed run."""

    job: Run
    records: Records
    directory: Path
    pace: Pace
    patience: float
    say: Say
    made: list[Made] = field(default_factory=list)
    _finished: bool = False
    _useless: int = 0
    _new: int = 0
    _shown: int = 0
    _room: int = 0  # steps that a gang may need to come to an end

    def run(self, kills: list[Kill]) -> None:
        """Make all kills, then let training end. Raises ProofError."""
        self._limit(kills[0])
        self.job.start()
        self._until(self.records.together, "all ranks made a first step")
        for index, kill in enumerate(kills):
            following = kills[index + 1] if index + 1 < len(kills) else None
            self._limit(kill)
            self._wait_until_due(kill)
            made = self._make(kill, following)
            self.made.append(made)
            if following is None or not following.restarting:
                self._return(made)
                self._show(len(kills))
        open_gate(self.directory / GATE, OPEN)
        self._until(lambda: self._finished, "training ended")

    # --- Seeing --------------------------------------------------------------------------

    def _look(self) -> None:
        self.records.look()
        if self._finished or self.job.running():
            return
        self.records.look()
        code = self.job.exit_code
        if code == 0:
            self._finished = True
            return
        if code in contract.PERMANENT_EXIT_CODES or code == contract.ExitCode.DIVERGED:
            raise ProofError(f"the launcher ended with exit code {code}, which no restart follows")
        # New steps: a script that fails after its loop comes to its end in each launch.
        new = sum(len(story.first_at) for story in self.records.stories) + len(self.made)
        self._useless = self._useless + 1 if new == self._new else 0
        self._new = new
        if self._useless > _USELESS_LAUNCHES:
            raise ProofError(
                f"training does not come back: {self._useless} launches in a row made no new"
                f" step (exit code {code})"
            )
        self.job.start()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises ProofError when no rank recorded anything for too long."""
        seen, since = -1.0, time.monotonic()
        while not condition():
            self._look()
            newest = max(story.last_at for story in self.records.stories)
            if newest != seen:
                seen, since = newest, time.monotonic()
            elif time.monotonic() - since > self.patience:
                raise ProofError(
                    f"training does not come back: nothing was recorded for {self.patience:g} s,"
                    f" before {what}; --patience SECONDS allows more"
                )
            if self._finished and not condition():
                raise ProofError(f"training ended before {what}")
            time.sleep(_LOOK_SECONDS)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._look()
            time.sleep(min(left, _LOOK_SECONDS))

    def _limit(self, kill: Kill) -> None:
        """Keep all ranks near the step of a kill until it is made.

        After SIGTERM a rank may first end the step after the next.
        """
        if kill.point == "snapshot":
            limit = kill.step + 2 * self.pace.every
        elif kill.saved:
            limit = self._snapshot_before(kill.step) - 1
        elif kill.restarting:
            limit = max(kill.step, self.records.step) + 3
        else:
            limit = kill.step + 2
        self._open(limit)

    def _open(self, step: int) -> None:
        step = max(step, self.records.step + self._room)
        open_gate(self.directory / GATE, min(step, self.pace.total_steps))

    def _snapshot_before(self, step: int) -> int:
        return step // self.pace.every * self.pace.every

    # --- Killing -------------------------------------------------------------------------

    def _wait_until_due(self, kill: Kill) -> None:
        if kill.restarting:
            if not kill.point:
                self._pause(kill.delay * self._usual_return())
            return
        if kill.saved:
            # First wait before that snapshot, which a writer that is behind would skip.
            self._await_snapshot(self._snapshot_before(kill.step) - 1)
            self._await_snapshot(kill.step)
            # A restart after the last step would have no step to compare.
            self._open(min(kill.step + 2, self.pace.total_steps - 1))
        self._await_step(kill.step)
        if not kill.point:
            self._pause(kill.delay * self.pace.step_seconds)

    def _await_step(self, step: int) -> None:
        """Wait for a step, or for all ranks' end: an early one is a difference."""
        self._until(
            lambda: self.records.step >= step or self.records.ended(), f"step {step} was reached"
        )

    def _await_snapshot(self, step: int) -> None:
        """Hold all ranks after this step until the snapshot before it is durable."""
        self._open(step)
        self._await_step(step)
        until, wanted = time.monotonic() + _STUCK_SECONDS, self._snapshot_before(step)
        self._until(
            lambda: self._newest_snapshot() >= wanted or time.monotonic() > until,
            f"the snapshot before step {step} was durable",
        )

    def _newest_snapshot(self) -> int:
        found = max((self.directory / "snapshots").glob("*/step-*.json"), default=None)
        return int(found.stem.removeprefix("step-")) if found is not None else 0

    def _usual_return(self) -> float:
        """Return the seconds from the latest kill to the first new step."""
        seen = [made.seconds for made in self.made if made.how in ("in place", "new launch")]
        return seen[-1] if seen else self.pace.start_seconds

    def _make(self, kill: Kill, following: Kill | None) -> Made:
        note = ""
        if kill.point:
            made = self._at_point(kill)
            if made is not None:
                self._aftermath(made, following)
                return made
            note = " (not reached, killed at once)"
        pid = 0
        while not pid:
            self._until(lambda: self._victim(kill) > 0, "there is somebody to kill")
            pid = self._victim(kill)
        made = self._mark(kill, pid, note)
        children.send(pid, kill.signal)
        self._aftermath(made, following)
        return made

    def _mark(self, kill: Kill, pid: int, note: str = "") -> Made:
        events = [story.events for story in self.records.stories]
        records = self.records
        at, attempt = time.monotonic(), self.job.attempt
        return Made(kill, at, attempt, records.incarnation, events, pid, note, done=records.step)

    def _aftermath(self, made: Made, following: Kill | None) -> None:
        """Open the gate for the next kill; continue a process that was only paused."""
        self._room = _STOP_STEPS if made.kill.signal == signal.SIGTERM else 0
        if following is None:
            open_gate(self.directory / GATE, OPEN)
        else:
            self._limit(following)
        if made.kill.resumes:
            self._pause(_SHORTEST_PAUSE + made.kill.delay)
            children.send(made.pid, signal.SIGCONT)

    def _victim(self, kill: Kill) -> int:
        """Return the pid of the launcher, or of the rank's newest process; 0: none lives."""
        launcher = kill.victim == LAUNCHER
        started = trace.workers(self.directory / TRACE_FILE)
        pid = self.job.pid if launcher else started.get(kill.victim, 0)
        parent, state = process_state(pid)
        ours = launcher or parent == self.job.pid
        return pid if ours and state not in ("", "Z") else 0

    def _at_point(self, kill: Kill) -> Made | None:
        """Arm the point and wait. None: the gang passed without reaching it."""
        armed = self.directory / failpoints.ARMED
        order = {
            "number": kill.number,
            "point": kill.point,
            "rank": None if kill.anybody else kill.victim,
            "hits": kill.hits,
            "signal": int(kill.signal),
        }
        before = self._mark(kill, 0)
        temporary = armed.with_suffix(".tmp")
        temporary.write_text(json.dumps(order))
        temporary.rename(armed)
        if kill.point == "barrier":
            open_gate(self.directory / GATE, OPEN)
        find = functools.partial(failpoints.fired, self.directory, kill.number)
        self._until(
            lambda: find() is not None or self._went_by(before), f"{kill.point} was reached"
        )
        with contextlib.suppress(FileNotFoundError):
            armed.unlink()
        found = find()
        if found is None:
            return None
        self.records.look()
        made = self._mark(kill, found[0])
        made.at -= max(0.0, time.time() - found[1])
        return made

    def _went_by(self, before: Made) -> bool:
        """Return whether the gang has passed the point: it waits, or is back."""
        if self._finished:
            return True
        stories = self.records.stories
        quiet = time.monotonic() - max(before.at, *(story.last_at for story in stories))
        if before.kill.restarting:
            back = self.records.incarnation > before.incarnation and self.records.together()
            return back or quiet > max(_STUCK_SECONDS, 2 * self.pace.start_seconds)
        return quiet > max(_STUCK_SECONDS, 5 * self.pace.step_seconds)

    # --- Coming back ---------------------------------------------------------------------

    def _return(self, made: Made) -> None:
        """Wait until every rank has finished a new step."""
        self._until(lambda: bool(self._how(made)), f"training goes on after {made.kill}")
        made.how = self._how(made)
        self._room = 0  # nobody comes to an end any more
        if made.how in ("in place", "new launch"):
            back = max(story.progress_at for story in self.records.stories)
            # It may have come back from an earlier kill just before this one.
            since = made if back > made.at else self.made[self._shown]
            made.seconds = back - since.at

    def _how(self, made: Made) -> str:
        if self._finished:
            return "finished"
        newest = self.records.incarnation
        first = self.made[self._shown]  # since all ranks stepped together
        restarted = "in place" if newest[0] == first.attempt else "new launch"
        if newest > made.incarnation and self.records.together():
            return restarted
        stories = self.records.stories
        if self._stops_no_more(made) and newest == made.incarnation:
            return "went on"
        unhurt = made.kill.resumes or made.pid not in [story.pid for story in stories]
        moved = all(
            story.events >= events + 2 or story.ended
            for story, events in zip(stories, made.events, strict=True)
        )
        if not (unhurt and moved and newest == made.incarnation):
            return ""
        return "went on" if newest == first.incarnation else restarted

    def _stops_no_more(self, made: Made) -> bool:
        """Return whether SIGTERM came too late: all ranks have reached their end."""
        late = made.kill.signal == signal.SIGTERM and made.kill.point != "barrier"
        return late and self.records.ended()

    def _show(self, count: int) -> None:
        """Print one line for each kill since the last that came back."""
        for made in self.made[self._shown :]:
            how = made.how or "killed again before it was back"
            seconds = f" after {made.seconds:.2f} s" if made.seconds else ""
            number = f"{made.kill.number}/{count}"
            self.say(f"kill {number:>7}  {f'{made.kill}{made.note}':<58} {how}{seconds}")
        self._shown = len(self.made)
