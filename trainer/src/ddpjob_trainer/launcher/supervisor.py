"""Run the launcher's one loop: signals, reaping, the hub's messages, the rounds.

`ddpjob-trainer run` calls it with a config. Everything happens in the main thread, woken by signals
and sockets; threads only pump output, resolve names, restore files and serve HTTP. When the loop
ends no descendant of the launcher is alive.
"""

from __future__ import annotations

import os
import selectors
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path

from ddpjob_contract import Round, State
from ddpjob_contract.resume import shown_words
from ddpjob_trainer import trace
from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher.hangs import HangResponse, Names, look
from ddpjob_trainer.launcher.host import Connections, NoRoomError, RuntimeDir, Signals
from ddpjob_trainer.launcher.hub import membership, root_cause, rounds
from ddpjob_trainer.launcher.hub.messages import Go
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.local_round import LocalRound, Parked, Phase, Running, Stopping
from ddpjob_trainer.launcher.output import Events, Log, OutputPump
from ddpjob_trainer.launcher.printed import Reading
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.reports import endpoints, evidence, live, termination
from ddpjob_trainer.launcher.reports.endpoints import LauncherMetrics, forget_dead
from ddpjob_trainer.launcher.reports.state import Results, Summary, state_body
from ddpjob_trainer.launcher.rescue import Rescuer
from ddpjob_trainer.launcher.starter import Starter
from ddpjob_trainer.launcher.workdir import Checkpoints
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.telemetry.event_log import EventLog

_TICK_SECONDS = 1.0
_HEALTHY_SECONDS = 10.0


class Supervisor:
    """Runs all rounds of one launcher."""

    def __init__(self, config: LaunchConfig, refill: Callable[[Path], None] | None = None) -> None:
        """Take ``refill``, which restores the working directory to a new pod's, except one path."""
        self._config = config
        # All ranks of a single launcher share its folder and continue from the files there.
        self._refill = refill if config.replicas > 1 else None
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        self._tick = time.monotonic()
        self._ended = termination.Ended()
        self._log = Log()
        self._summary = Summary(config, self._tick)
        self._counted = LauncherMetrics()
        self._reading = Reading(config.output, self._log.say, forms=not config.uses_our_library)
        self._evidence = evidence.Keeper(config, self._log.say, self._reading)
        # Beside rank 0, which is a worker of this launcher.
        log = EventLog(config.events) if config.events and config.replica == 0 else None
        self._events = Events(log)
        alone = config.standalone or config.world_size == config.nproc
        names = Names(None if alone else config.master[0], self._log.say)
        self._hangs = HangResponse(
            config.env.deadlines, self._counted.hangs, self._log, names,
            starts=config.watched_at_start,
        )  # fmt: skip

    @property
    def _workers(self) -> WorkerGroup:
        return self._phase.round.workers

    def run(self) -> int:
        """Run all rounds; return the launcher's exit code."""
        try:
            code = self._run()
        except Exception as error:
            # A fault of the launcher or of this machine: the report must name it.
            if not isinstance(error, NoRoomError):
                self._log.put(2, traceback.format_exc().encode(errors="replace"))
            code = termination.broke(self._config, error, self._log.say)
        # The report is written: a signal hurries the end, but does not change it.
        late_signal = self._signals.end_at_once(code)
        self._log.flush(hurry=self._ended.signal != 0 or late_signal)
        return code

    def _run(self) -> int:
        config = self._config
        self._runtime_dir = RuntimeDir(config.nproc)
        children.adopt_orphans()
        try:
            with self._signals.collected(self._selector):
                # On a terminal several launchers may write; a pod's name tells whose line it is.
                several = config.nproc > 1 or (config.world_size > 1 and os.isatty(1))
                self._pump = OutputPump(self._log, prefixed=several, secret_url=config.env.upload)
                self._start()
                http = self._serve()
                try:
                    self._watch()
                finally:
                    left = self._leave_nobody()
                    if http is not None:
                        http.end()
                return self._finish(left)
        finally:
            self._runtime_dir.close()

    # --- Start ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Join the gang; begin the first round, or wait for the hub's Go."""
        config, say = self._config, self._log.say
        checkpoints = Checkpoints(config.resume_when, emptied=self._refill is not None)
        self._member = membership.join(
            config, self._selector, say, lambda: self._summary.progress.newest,
            checkpoints.look, self._tick,
            self._newest_snapshot,
        )  # fmt: skip
        if not config.standalone and (shell := children.shell_above()):
            say(
                f"warning: {shell} passes no SIGTERM on: when this pod is deleted, drained"
                " or evicted it ends without a snapshot; start the launcher with `exec`,"
                " as the last command"
            )
        # Here others' links come in, by which they are known.
        hub = config.hub_port if self._member.server else None
        self._connections = Connections(hub, config.metrics_port)
        self._starter = Starter(config, self._runtime_dir, self._selector, say)
        if config.replacement:  # it replaces a lost launcher, or is a standby: it waits for Go
            trace.configure(config.env.trace, -1, 0)
            self._phase: Phase = Parked(self._round(config.first), self._tick)
            self._starter.prepare(self._workers)
            return
        if earlier := checkpoints.leave():
            cure = f"to go on from it, add {shown_words(config.resume_words(earlier))}"
            what = "the program begins without it, and may write over it"
            say(f"{earlier} is there before the first start: {what}; {cure}")
        self._begin(config.first, self._tick)

    def _newest_snapshot(self) -> int | None:
        """Return the step of the newest that is known in a round that trains, -1: of none."""
        trains = isinstance(self._phase, Running) and self._workers.is_training()
        return self._workers.snapshot_step() if trains else None

    def _round(self, key: Key) -> LocalRound:
        config, say, path = self._config, self._log.say, self._runtime_dir.round_path(key)
        unresolved = lambda: self._hangs.names.lasting  # noqa: E731
        workers = WorkerGroup(config, key, path, self._pump, say, unresolved)
        rescuer = None
        if config.env.rescue:
            rescuer = Rescuer(workers, self._selector, self._member.link.send, say)
        return LocalRound(config, workers, self._member, self._ended, say, rescuer=rescuer)

    def _begin(self, key: Key, now: float, *, again: bool = False) -> None:
        """Begin a round. ``again``: one was before it here."""
        self._ended.abandoned = False
        trace.configure(self._config.env.trace, -1, key.round)
        self._hangs.begin(now)
        self._reading.begin()
        self._connections.begin()
        self._phase = Running(self._round(key), now)
        if self._refill and again:
            self._restore(self._refill)
        self._evidence.begin(self._config, self._workers, self._pump.tail, now)
        drills = self._member.rounds and rounds.drills_left(self._summary.results.records)
        drill = self._config.env.drill if drills else "Never"
        self._starter.begin(self._workers, now, drill, self._summary.account.reached)
        self._summary.account.begin("round", now, None)
        trace.mark("started")

    def _restore(self, refill: Callable[[Path], None]) -> None:
        """Restore the working directory; keep the links alive if that takes long."""
        with futures.ThreadPoolExecutor(1) as pool:
            work = pool.submit(refill, self._runtime_dir.path)
            while not futures.wait([work], _TICK_SECONDS).done:
                self._sleep(0)
                self._tick = time.monotonic()
                self._member.tick(self._tick)
            work.result()

    def _next_round(self, go: Go, now: float) -> None:
        config, old, records = self._config, self._workers, go.records
        if records:
            kind = records[-1].get("kind", "peerLost")
            self._log.say(f"round {go.round}: {_reason(records[-1])}; restarting in place")
            planned = kind in ("drill", "grown")
            self._events.write(kind if planned else "failure", **records[-1])
            self._counted.rounds[kind] += 1
        elif config.env.replacement or go.number > config.attempt:
            self._log.say(f"round {go.round}: the hub was replaced, by hub {go.number}")
        trace.mark("go")
        self._evidence.follows(records)
        size = go.size or config.env.replicas
        if (go.replica, size) != (config.replica, config.replicas) and config.hub_port is not None:
            of = f" of {size}" if go.size else ""
            self._log.say(f"this pod serves replica {go.replica}{of} from now on")
            self._config = replace(config, replica=go.replica, replicas=size)
            self._starter.serve(self._config)
        self._starter.go_on(go.newest)
        self._summary.results = replace(self._summary.results, records=records)
        self._counted.round = go.round
        self._begin(go.key, now, again=old.key.round >= 0)
        forget_dead(self._runtime_dir.metrics)
        shutil.rmtree(old.state_dir, ignore_errors=True)

    # --- Watch ---------------------------------------------------------------------------

    def _watch(self) -> None:
        """Run the loop until this launcher's part is done."""
        while True:
            # Input is read before deadlines are checked. In this order: a failure elsewhere that
            # the hub reports here is older than an exit that is reaped below.
            self._sleep(0)
            now = self._tick = time.monotonic()
            self._starter.hand_over(now)
            for pid, status in children.reap():
                self._workers.ended(pid, status, now)
                self._starter.spares.ended(pid)
            self._counted.workers = self._workers.running
            while self._signals.pending:
                self._phase.forward(self._signals.pending.pop(0), now)
            terminating = self._ended.signal != 0
            lines = self._member.link.lines
            hangs_due = self._hangs.tick(self._workers, lines, now, terminating=terminating)
            if self._workers.pids:
                self._connections.look(now, self._reached)
            self._counted.silent_seconds = max(0.0, now - lines.gang)
            if isinstance(self._phase, Running):
                self._phase = self._phase.report(now)
            self._phase.round.look(now)
            if self._reading.look(self._pump, now):
                self._counted.printed = self._reading.metrics()
            self._evidence.tick(self._hangs.found, now)
            member_due = self._member.tick(now)
            self._take_messages(now)
            self._phase.stop_the_rest(now)
            self._book(now)
            kill_due = self._workers.kill_when_due(now)
            self._starter.recall()
            self._report_stopped(now)
            if self._phase.is_over(now):
                return
            if not self._signals.pending and not self._member.link.inbox:
                idle = isinstance(self._phase, Parked) and self._phase.is_idle(now)
                spares_due = self._starter.refill(now, parked=idle)
                dues = (member_due, kill_due, hangs_due, spares_due, now + _TICK_SECONDS)
                self._sleep(min(due for due in dues if due is not None) - now)

    def _sleep(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            key.data(time.monotonic())

    def _take_messages(self, now: float) -> None:
        """Do as the hub's messages say."""
        inbox = self._member.link.inbox
        while inbox:
            message = inbox.popleft()
            if not isinstance(message, Go):
                self._phase = self._phase.handle(message, now)
            elif self._phase.begins(message):
                self._next_round(message, now)
        self._phase = self._phase.check_hub(now)

    def _book(self, now: float) -> None:
        """Note where the time goes from now on, unless workers' records say it."""
        if self._phase.stopped:
            hub = self._member.hub
            waits = isinstance(self._phase, Parked) and (hub is None or hub.waits)
            state = self._workers.state(0)
            self._summary.account.begin("held" if waits else "recovering", now, state)

    def _report_stopped(self, now: float) -> None:
        """Report Stopped once the round's processes are gone; until then report Exiting."""
        stopping = self._phase
        if not isinstance(stopping, Stopping):
            return
        if not self._workers.is_gone(self._starter.spares.pids()):
            stopping.report_exiting(now)
            return
        self._counted.teardown_seconds = now - stopping.since
        trace.mark("stopped")
        self._phase = stopping.report_stopped(self._summary.add(self._workers), now)
        self._evidence.stopped(self._member.hub, stopping.round.hub_lost)

    # --- End -----------------------------------------------------------------------------

    def _leave_nobody(self) -> list[str]:
        """Kill and reap every descendant; report and return those that do not end."""
        hopeless = self._workers.unkillable
        left = children.end_all(
            lambda pid, status: self._workers.ended(pid, status, time.monotonic()),
            self._config.exit_seconds,
            hopeless,
        )
        said = list(hopeless.values())
        if others := [str(pid) for pid in left if pid not in hopeless]:
            said.append(f"killed, but not gone, and left behind: pid {', '.join(others)}")
            self._log.say(said[-1])
        return said

    def _finish(self, left: Sequence[str]) -> int:
        """Write the report and the last evidence; return the exit code."""
        config, workers, ended = self._config, self._workers, self._ended
        for local_rank in range(config.nproc):
            self._pump.collect(config.rank(local_rank))
        self._reading.look(self._pump, now=time.monotonic(), last=True)
        self._connections.look(time.monotonic(), self._reached, last=True)
        results = self._shown(self._summary.close(workers, signalled=ended.signal != 0))
        code = termination.finish(config, workers, self._pump, results, ended, left, self._log.say)
        self._member.close()
        self._evidence.end(ended, self._member.hub, self._phase.round.hub_lost, code)
        self._events.write("end", code=int(code), round=workers.round)
        self._events.end()
        return code

    # --- What others may ask -------------------------------------------------------------

    def _serve(self) -> endpoints.Server | None:
        port, metrics = self._config.metrics_port, self._runtime_dir.metrics
        self._counted.value = lambda: self._shown(self._summary.read(self._workers)).values or {}
        healthy = lambda: time.monotonic() - self._tick < _HEALTHY_SECONDS  # noqa: E731
        if port is None:
            return None
        try:
            return endpoints.serve(port, metrics, self._counted, self._state, healthy, self._look)
        except OSError as error:
            self._log.say(f"no /state and /metrics: port {port}: {error.strerror}")
            return None

    def _look(self, path: str, query: str, local: bool) -> tuple[int, str]:
        uid = "" if self._config.standalone else self._config.uid
        if not local:
            return endpoints.NONE
        return live.answer(self._workers, uid, path, query, look)

    def _shown(self, results: Results) -> Results:
        """Add what the program has printed; values that the library has come first."""
        values = {**self._reading.reader.numbers.metrics, **(results.values or {})}
        met = self._connections.met
        return replace(results, printed=self._reading.facts(), values=values, connected=met)

    def _reached(self) -> object:
        """Return what another step changes: of the library, printed, or a file's time."""
        state, printed = self._workers.state(0), self._reading.reader.numbers.step
        return state and state.step, printed, self._summary.progress.newest

    def _state(self) -> State:
        config, round_, workers = self._config, self._phase.round, self._workers
        return state_body(
            workers.state(0),
            uid="" if config.standalone else config.uid,
            attempt=workers.key.number,
            round_=workers.round,
            gang=self._member.gang,
            results=self._shown(self._summary.read(workers)),
            stacks=self._hangs.stacks,
            silent=self._counted.silent_seconds if workers.pids else None,
            pace=round_.pace.per_second(time.monotonic()),
        )


def _reason(last: Round) -> str:
    """Word why a round follows, by the record of the one before."""
    if last.get("kind") == "drill":
        return f"a drill after step {last['step']}, as planned"
    if last.get("kind") == "grown":
        return "more launchers are here, and all have saved together"
    if last.get("kind") == "lost":
        return f"the launcher of replica {last['replica']} was lost"
    what = "a process ended" if "rank" not in last else f"rank {last['rank']} ended"
    return f"{what} ({root_cause.in_words(last)})"
