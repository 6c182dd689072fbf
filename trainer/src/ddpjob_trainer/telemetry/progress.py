"""Publish a run to people and machines, from one place.

The run reports its present activity (at) and its events (stepped, saved, ...). From these come the
rank's record with its signs of life, metrics, the event log and lines for people.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddpjob_contract import Proof, Resumed, Straggler
from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.liveness.heartbeat import (
    ACTIVITIES,
    COMPILES,
    PROOF,
    RESUMED,
    SNAPSHOTS,
    STRAGGLER,
    VALUES,
    Activity,
    Phase,
    RankStateWriter,
)
from ddpjob_trainer.liveness.step_times import StepAccount
from ddpjob_trainer.printing import say
from ddpjob_trainer.telemetry.event_log import EventLog, exact
from ddpjob_trainer.telemetry.metrics import Metrics
from ddpjob_trainer.telemetry.run_log import CLOSE_SECONDS, HURRY_SECONDS, Pending, Sink, Values

_LOG_LINES = 40  # in a whole run, when Logging.every is not given
_MOST_VALUES = 16
_ODD = re.compile(r"[^A-Za-z0-9_./@-]")  # in a name: it becomes a label
_RATE_SECONDS = 60.0  # between two rates where lines are further apart
Readings = Callable[[], Mapping[str, float]]


class Progress:
    """Takes the run's events and publishes them."""

    def __init__(
        self,
        rank: int,
        writer: RankStateWriter,
        *,
        total_steps: int,
        global_batch: int,
        log_every: int,
        samples_per_step: int,
        rendezvous_seconds: float = 0.0,
        reached: int = 0,
        events: EventLog | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._rank = rank
        self._writer = writer
        self.metrics = Metrics(rank)
        self._total = total_steps
        self._global_batch = global_batch
        self._samples = samples_per_step
        self._log_every = log_every  # 0: derived from the number of steps
        self._events = events
        self._sinks = sinks
        self._pending = Pending()
        self._values: dict[str, float] = {}  # the script's own, for the launcher to show
        self._readings: Readings = dict
        self._rated = (0, 0.0)  # step and time of the last rate
        self._last = 0.0  # when the last step ended
        self.took = (0, 0.0)  # the newest step, and its seconds; not the first, which is a start
        self._first = True  # no step of this process has ended yet
        self._seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self._account = StepAccount(reached)
        # Of a device, in another thread: a host's time to queue work says nothing.
        self.of_device: Mapping[Activity, float] = {}
        self._published: dict[Activity, float] = {}  # of these
        self._activity: Activity = "build"
        self.since = time.monotonic()  # when that began
        self.metrics.stage("rendezvous", rendezvous_seconds)
        writer.mark("build", self.since)
        if total_steps:
            self.plan(total_steps)

    # --- Now -----------------------------------------------------------------------------

    def at(self, activity: Activity) -> None:
        """Report this rank's activity from now on; this is a sign of life."""
        now = time.monotonic()
        self._seconds[self._activity] += now - self.since
        self._account.passed(self._activity, now - self.since)
        self._activity = activity
        self.since = now
        self._writer.mark(activity, now)

    def alive(self) -> None:
        """Give a sign of life during a long activity."""
        self.at(self._activity)

    def phase(self, phase: Phase) -> None:
        """Choose the watchdog's deadline from now on."""
        if phase == "step" and self._first:
            phase = "startup"  # the first step compiles and warms up: it has the time of a start
        self._writer.update(phase=phase)
        if phase == "snapshot":
            self.at("snapshot")
        elif phase == "done":
            self.at("end")
            if not self._pending.ended:  # else later steps flush it
                self._report_logged()
            self._pending.at_once = True
            self._publish(force=True)
        elif self._activity == "snapshot":
            self.at("agreement")

    def finished(self) -> None:
        """Record that nothing after this can fail the run."""
        self._writer.ends("finished")

    @contextlib.contextmanager
    def under(self, phase: Phase) -> Iterator[None]:
        """Have another phase's deadline hold in the block."""
        before = self._writer.state.phase
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(before)

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Report this rank's activity in the block, within the loop's body."""
        before = self._activity
        self.at(activity)
        try:
            yield
        finally:
            self.at(before)

    def built(self, readings: Readings) -> None:
        """Record that the script has built its objects. ``readings`` returns gauges of metrics."""
        self._readings = readings
        self.metrics.stage("build", time.monotonic() - self.since)
        self.at("load")

    def plan(self, total_steps: int) -> None:
        """Set the number of steps, which may shrink later."""
        self._total = total_steps
        self._log_every = self._log_every or max(1, total_steps // _LOG_LINES)
        self._writer.update(total_steps=total_steps)

    # --- Events --------------------------------------------------------------------------

    def resumed(self, step: int) -> None:
        """Record that training continues after ``step`` finished steps."""
        self.metrics.stage("load", time.monotonic() - self.since)
        self.at("data")
        self._rated = (step, self.since)
        self._last = self.since
        self._writer.update(step=step)
        self._event("resume", step=step)
        for sink in self._sinks:
            sink.start(step)
        self._pending.begin(step)

    def began_from(self, snapshot: Resumed) -> None:
        """Report rank 0's snapshot to the launcher, if it is another job's or was changed."""
        if "uid" in snapshot or snapshot.get("changed"):
            self._writer.report(RESUMED, snapshot)

    def proven(self, proof: Proof) -> None:
        """Note whether the steps done again were as before; or why nobody knows."""
        if "equal" in proof:
            self.metrics.set("resume_proven", float(proof["equal"]))
        if self._rank == 0:
            self._writer.report(PROOF, proof)

    def spent(self) -> tuple[float, float]:
        """Return the seconds of work and of waiting for data in the last ended step."""
        return self._account.newest

    def reported_straggler(self, slow: Straggler) -> None:
        """Report, as rank 0, the rank that holds up the others, or that none does any more."""
        self._writer.report(STRAGGLER, slow)
        if not slow:
            say(0, "no rank holds up the others any more")
            return
        does = "waits for its data" if slow["by"] == "data" else "computes"
        say(
            0,
            f"rank {slow['rank']} holds up the others: it {does} so much longer that they wait for"
            f" {slow['share']:.0%} of each step",
        )

    def body_ended(self) -> None:
        """Record the end of the script's part of a step, before stepped()."""
        self._pending.step_ended()

    def device_at(self, activity: Activity) -> None:
        """Report this device's activity, from another thread, while the loop waits."""
        self._writer.mark(activity)

    def stepped(self, step: int, loss: float) -> None:
        """Record the end of a step. ``loss``: its mean over all ranks."""
        self.alive()
        now = self.since
        seconds = now - self._last
        self._last = now
        metrics = self.metrics
        metrics.observe("step_seconds", seconds)
        metrics.set("step", step)
        metrics.set("loss", loss)
        metrics.add("samples", self._samples)
        line = step % self._log_every == 0 or step == self._total
        rate = None
        if line or now - self._rated[1] >= _RATE_SECONDS:
            since, moment = self._rated
            self._rated = (step, now)
            rate = (step - since) * self._global_batch / max(now - moment, 1e-9)
            metrics.set("samples_per_second", rate)
        if self._first and "torch._inductor.compile_fx" in sys.modules:
            self._writer.report(COMPILES, {})
        phase: Phase | None = "step" if self._first else None
        if rate is not None:
            self._writer.update(samples_per_second=rate)
        self._writer.update(phase=phase, step=step, loss=loss)
        for activity, total in list(self.of_device.items()):
            self._account.measured(activity, total)
        self._writer.spent(self._account.stepped(step, seconds, now))
        self.took = self.took if self._first else (step, seconds)
        if self._first:
            self._first = False
            metrics.stage("first_step", seconds)
        self._report_logged(step=True)
        if self._rank == 0 and line and rate is not None:
            self._show(step, loss, rate)
        took, pace = round(seconds, 6), round(self._global_batch / max(seconds, 1e-9), 3)
        self._event("step", step=step, loss=exact(loss), seconds=took, samplesPerSecond=pace)
        self._publish(force=step == self._total)

    def _show(self, step: int, loss: float, rate: float) -> None:
        newest = self._writer.state.snapshot_step
        tail = f" snapshot {newest}" if newest >= 0 else ""
        text = f"step {step}/{self._total} loss {loss:.4f} {rate:,.0f} samples/s{tail}"
        print(f"{text}\n", end="", flush=True)  # in one write: another thread may print, too
        values = {"loss": loss, "samples_per_second": rate, **self._readings()}
        self._send(step, self._pending.without_users(values))

    def log(self, step: int, values: Values) -> None:
        """Queue rank 0's numbers from the script until the step has ended."""
        self._pending.add(step, values)
        if self._pending.at_once:
            self._report_logged()

    def saved(self, step: int) -> None:
        """Record a snapshot as durable."""
        self._writer.update(snapshot_step=step)
        self.metrics.set("snapshot_step", step)
        self.metrics.set("snapshot_timestamp_seconds", time.time())
        if self._last:  # else it is the one to resume from
            self._event("snapshot", step=step)

    def saves_every(self, steps: int) -> None:
        """Report how many steps apart snapshots are, where rank 0 has chosen that."""
        self._writer.report(SNAPSHOTS, {"every": steps})

    def uploaded(self, step: int | None) -> None:
        """Record rank 0's upload of a snapshot; None: it failed."""
        if step is None:
            self.metrics.add("snapshot_upload_failures")
        else:
            self.metrics.set("snapshot_uploaded_step", step)

    def close(self, *, hurry: bool = False) -> None:
        """Publish all that is left. Safe to repeat.

        ``hurry``: the process must stop, or fails: sinks without an answer are abandoned.
        """
        self._report_logged()
        self._publish(force=True)
        deadline = time.monotonic() + (HURRY_SECONDS if hurry else CLOSE_SECONDS)
        for sink in self._sinks:
            sink.finish()
        for sink in self._sinks:
            sink.wait(max(0.0, deadline - time.monotonic()))
        self._sinks = ()

    # --- Inside --------------------------------------------------------------------------

    def _publish(self, *, force: bool = False) -> None:
        metrics = self.metrics
        if not metrics.due(force=force):
            return
        metrics.set("heartbeat_timestamp_seconds", time.time())
        for activity, total in list(self.of_device.items()):
            self._seconds[activity] = total - self._published.get(activity, 0.0)
            self._published[activity] = total
        for activity, seconds in self._seconds.items():
            if seconds:
                metrics.add("phase_seconds", seconds, activity)
                self._seconds[activity] = 0.0
        for name, value in self._readings().items():
            metrics.set(name, value)
        metrics.flush()
        if self._rank == 0 and self._values:
            self._writer.report(VALUES, self._values)

    def _report_logged(self, *, step: bool = False) -> None:
        for number, values in self._pending.take(step=step):
            self._event("log", step=number, values={n: exact(v) for n, v in values.items()})
            self._send(number, values)
            named = {_ODD.sub("_", n)[:40]: v for n, v in values.items() if math.isfinite(v)}
            self._values = dict([*(self._values | named).items()][:_MOST_VALUES])

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.put(step, values)

    def _event(self, event: str, **fields: object) -> None:
        if self._events is not None and (problem := self._events.write(event, **fields)):
            say(self._rank, problem)


# --- The device's work ----------------------------------------------------------------------------
# When a GPU hangs, the hosts of all ranks wait somewhere. So Loop queues a mark behind each
# batch, forward, backward and update. The first mark that has not been passed says whether this
# rank waits for its own work or for another's.

_LOOK_SECONDS = 1.0
#: Whose seconds are the device's; what it does for other ones, their hosts wait for.
_COUNTED: tuple[Activity, ...] = ("data", "forward", "backward", "update")


class DeviceWatch:
    """A thread, where there is a queue to be watched."""

    def __init__(self, accelerator: Accelerator, progress: Progress) -> None:
        self._accelerator = accelerator
        self._progress = progress
        self._marks: deque[tuple[Activity, Any]] = deque()
        self._passed: Any = None  # the newest mark that was
        self._seconds: dict[Activity, float] = dict.fromkeys(_COUNTED, 0.0)
        self._over = threading.Event()
        self._reported: tuple[float, Activity] | None = None

    def start(self) -> None:
        """Look now and then, until stop()."""
        if self._accelerator.queues:
            self._progress.of_device = self._seconds
            threading.Thread(target=self._run, name="device watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def queued(self, activity: Activity) -> None:
        """Mark all that was queued since the last mark as of this activity."""
        if self._accelerator.queues:
            self._marks.append((activity, self._accelerator.mark()))

    def look(self, now: float) -> None:
        """Report the device's activity if the loop gave no sign of life for long.

        Once, and again when it does something else: what never changes is a hang.
        """
        while self._marks and self._marks[0][1].query():
            activity, mark = self._marks.popleft()
            if self._passed is not None and activity in self._seconds:
                self._seconds[activity] += self._passed.elapsed_time(mark) / 1000
            self._passed = mark
        since = self._progress.since
        if not self._marks or now - since < _LOOK_SECONDS:
            return
        found = (since, self._marks[0][0])
        if found != self._reported:
            self._reported = found
            self._progress.device_at(found[1])

    def _run(self) -> None:
        try:
            self._accelerator.enter()
            while not self._over.wait(_LOOK_SECONDS):
                self.look(time.monotonic())
        except RuntimeError:  # of CUDA; the main thread hears of it, too
            return
