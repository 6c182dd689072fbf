"""Run the launcher's one loop: signals, reaping, the hub's messages, the rounds.

`ddpjob-trainer run` calls it with a config. Everything happens in the main thread, woken by signals
and sockets; threads only pump output, resolve names, restore files and serve HTTP. When the loop
ends no descendant of the launcher is alive.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from enum import Enum
from pathlib import Path

from ddpjob_contract import Round, Spent, State
from ddpjob_trainer import trace
from ddpjob_trainer.arguments import shown_words
from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher.hub import membership, root_cause, rounds
from ddpjob_trainer.launcher.hub.messages import (
    Done,
    End,
    Exiting,
    Failed,
    Finished,
    Go,
    Leaving,
    Message,
    Stop,
    Stopped,
)
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.log import Log
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.reports import endpoints, evidence, termination
from ddpjob_trainer.launcher.reports.account import Account
from ddpjob_trainer.launcher.reports.events import Events
from ddpjob_trainer.launcher.reports.metrics import LauncherMetrics, forget_dead
from ddpjob_trainer.launcher.reports.progress_path import ProgressPath
from ddpjob_trainer.launcher.reports.state import Pace, Results, state_body
from ddpjob_trainer.launcher.runtime_dir import NoRoomError, RuntimeDir
from ddpjob_trainer.launcher.signals import ENDING, Signals
from ddpjob_trainer.launcher.starter import Starter
from ddpjob_trainer.launcher.watch.checkpoints import Checkpoints
from ddpjob_trainer.launcher.watch.hangs import HangResponse
from ddpjob_trainer.launcher.watch.names import Names
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.telemetry.event_log import EventLog

_TICK_SECONDS = 1.0
_HEALTHY_SECONDS = 10.0
#: When no round can follow: seconds for a worker's last output after another one failed.
_LAST_WORDS_SECONDS = 1.0
#: The hub answers a failure in milliseconds; a barrier takes as long as processes take to end.
_ANSWER_SECONDS = 10.0
#: Between two messages to the hub that killed processes have not ended yet.
_EXITING_SECONDS = 1.0
#: A round may need succeeded workers again; the launcher waits so long for it.
_SUCCESS_SECONDS = 60.0
#: For the progress path: a file server that does not answer must not delay the launcher.
_POLL_SECONDS = 0.2


class _Phase(Enum):
    """The launcher's state. Workers run in the first two only.

    ``_handle`` (the hub's words), ``_check_hub`` (its loss) and ``_report_stopped`` change it.
    """

    RUNNING = "running"  # in a round
    STOPPING = "stopping"  # the hub said Stop, or was lost: what runs here ends
    PARKED = "parked"  # linked or not, it waits for the hub's Go
    SUCCEEDED = "succeeded"  # all ended with 0, and the hub knows


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
        self._phase = _Phase.RUNNING
        self._since = self._tick  # when the phase began
        self._began = False  # a round has begun here
        self._warned = False
        self._said_parked = False
        self._linked_at = self._tick  # when the hub was there last
        self._reported = 0  # exits that the hub knows of
        self._exiting_reported = 0.0  # when the hub last heard that killed processes have not ended
        self._results = Results()
        self._account = Account(
            self._tick, config.env.reached, reports_steps=config.uses_our_library
        )
        # Beside the hub, which asks for it.
        self._progress = ProgressPath(config.env.progress_path if config.replica == 0 else None)
        self._checkpoints = Checkpoints(config.resume_when, emptied=self._refill is not None)
        self._ended = termination.Ended()
        self._finished = False
        self._counted = LauncherMetrics()
        self._log = Log()
        alone = config.standalone or config.world_size == config.nproc
        names = self._names = Names(None if alone else config.master[0], self._log.say)
        self._pace = Pace()
        self._hangs = HangResponse(
            config.env.deadlines, self._counted.hangs, self._log, names,
            starts=config.watched_at_start,
        )  # fmt: skip
        self._evidence = evidence.Keeper(config, self._log.say)
        # Beside rank 0, which is a worker of this launcher.
        self._events = Events(
            EventLog(config.events) if config.events and config.replica == 0 else None
        )

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
        told_late = self._signals.end_at_once(code)
        self._log.flush(hurry=self._ended.signal != 0 or told_late)
        return code

    def _run(self) -> int:
        config = self._config
        self._runtime_dir = RuntimeDir(config.nproc)
        children.adopt_orphans()
        try:
            with self._signals.collected(self._selector):
                # On a terminal several launchers may write; a pod's name tells whose line it is.
                several = config.nproc > 1 or (config.world_size > 1 and os.isatty(1))
                self._pump = OutputPump(
                    self._log, prefixed=several, secret_url=self._config.env.upload
                )
                self._member = membership.join(
                    config, self._selector, self._log.say, lambda: self._progress.newest,
                    self._checkpoints.look, self._tick,
                )  # fmt: skip
                if not config.standalone and (shell := children.shell_above()):
                    self._log.say(
                        f"warning: {shell} passes no SIGTERM on: when this pod is deleted, drained"
                        " or evicted it ends without a snapshot; start the launcher with `exec`,"
                        " as the last command"
                    )
                self._starter = Starter(config, self._runtime_dir, self._selector, self._log.say)
                if config.replacement:
                    self._park()
                else:
                    if earlier := self._checkpoints.leave():
                        cure = f"to go on from it, add {shown_words(config.resume_words(earlier))}"
                        what = "the program begins without it, and may write over it"
                        self._log.say(f"{earlier} is there before the first start: {what}; {cure}")
                    self._begin(config.first, self._tick)
                http = self._serve()
                try:
                    self._watch()
                finally:
                    left = self._leave_nobody()
                    if http is not None:
                        http.end()
                for local_rank in range(config.nproc):
                    self._pump.collect(self._config.rank(local_rank))
                self._progress.poll(_POLL_SECONDS)
                results = replace(
                    self._results, modified=self._progress.newest, spent=self._spent()
                )
                code = termination.finish(
                    self._config, self._workers, self._pump, results, self._ended, left,
                    self._log.say,
                )  # fmt: skip
                self._member.close()
                self._evidence.end(self._ended, self._member.hub, code)
                self._events.write("end", code=int(code), round=self._workers.round)
                self._events.end()
                return code
        finally:
            self._runtime_dir.close()

    def _spent(self) -> Spent | None:
        """Close the account; its last stretch went to saving where a signal has ended it."""
        if self._config.replica != 0:
            return None
        now, state = time.monotonic(), self._workers.state(0)
        self._account.begin("idle", now, state, rest="snapshot" if self._ended.signal else None)
        return self._account.read(now, None)

    # --- Start ---------------------------------------------------------------------------

    def _serve(self) -> endpoints.Server | None:
        config = self._config
        if config.metrics_port is None:
            return None
        try:
            return endpoints.serve(
                config.metrics_port,
                self._runtime_dir.metrics,
                self._counted,
                self._state,
                lambda: time.monotonic() - self._tick < _HEALTHY_SECONDS,
            )
        except OSError as error:
            self._log.say(f"no /state and /metrics: port {config.metrics_port}: {error.strerror}")
            return None

    def _state(self) -> State:
        now = time.monotonic()
        return state_body(
            state := (workers := self._workers).state(0),
            uid="" if self._config.standalone else self._config.uid,
            attempt=workers.key.number,
            round_=workers.round,
            gang=self._member.gang,
            results=replace(
                self._results.after(workers),
                modified=self._progress.newest,
                spent=self._account.read(now, state) if self._config.replica == 0 else None,
            ),
            stacks=self._hangs.stacks,
            pace=self._pace.per_second(now),
        )

    def _group(self, key: Key) -> WorkerGroup:
        path = self._runtime_dir.round_path(key)
        unresolved = lambda: self._names.lasting  # noqa: E731
        return WorkerGroup(self._config, key, path, self._pump, self._log.say, unresolved)

    def _park(self) -> None:
        """Wait for the hub's Go: this launcher replaces a lost one, or is a standby."""
        self._phase = _Phase.PARKED
        trace.configure(self._config.env.trace, -1, 0)
        self._workers = self._group(self._config.first)
        self._starter.prepare(self._workers)

    def _begin(self, key: Key, now: float) -> None:
        self._enter(_Phase.RUNNING, now)
        self._ended.abandoned = False
        self._reported = 0
        trace.configure(self._config.env.trace, -1, key.round)
        self._hangs.begin()
        self._warned = False
        self._pace.begin()
        self._workers = self._group(key)
        if self._refill and self._began:
            self._restore(self._refill)
        self._began = True
        self._evidence.begin(self._config, self._workers, self._pump.tail, now)
        drills = self._member.rounds and rounds.drills_left(self._results.records)
        drill = self._config.env.drill if drills else "Never"
        self._starter.begin(self._workers, now, drill, self._account.reached)
        self._account.begin("round", now, None)
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
            self._forward(now)
            terminating = self._ended.signal != 0
            hangs_due = self._hangs.tick(self._workers, now, terminating=terminating)
            self._report(now)
            self._warn_of_early_ends(now)
            self._pace.poll(self._workers.state(0), now)
            self._evidence.tick(self._hangs.found, now)
            member_due = self._member.tick(now)
            self._take_messages(now)
            self._stop_the_rest(now)
            self._book(now)
            kill_due = self._workers.kill_when_due(now)
            self._starter.recall()
            self._report_stopped(now)
            if self._is_finished(now):
                return
            if not self._signals.pending and not self._member.link.inbox:
                dues = (
                    member_due,
                    kill_due,
                    hangs_due,
                    self._starter.refill(now, parked=self._is_parked(now)),
                    now + _TICK_SECONDS,
                )
                self._sleep(min(due for due in dues if due is not None) - now)

    def _book(self, now: float) -> None:
        """Note where the time goes from now on."""
        hub = self._member.hub
        if self._phase in (_Phase.RUNNING, _Phase.SUCCEEDED):
            return  # its workers' records say it
        waits = self._phase is _Phase.PARKED and (hub is None or hub.waits)
        self._account.begin("held" if waits else "recovering", now, self._workers.state(0))

    def _sleep(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            key.data(time.monotonic())

    def _enter(self, phase: _Phase, now: float) -> None:
        self._phase, self._since = phase, now

    def _is_parked(self, now: float) -> bool:
        """Return whether it waits for longer than a round takes to begin; say so once."""
        parked = self._phase is _Phase.PARKED and now - self._since > _TICK_SECONDS
        if parked and not self._said_parked:
            standby = self._config.env.standby and self._member.link.linked
            until = "one of the gang is lost" if standby else "all launchers of the gang have come"
            self._log.say(f"nothing runs here: waiting until {until}")
        self._said_parked = parked
        return parked

    def _forward(self, now: float) -> None:
        while self._signals.pending:
            signum = self._signals.pending.pop(0)
            self._workers.signal(signum, now)
            if signum not in ENDING:
                continue
            if not self._ended.signal:
                self._ended.signal = signum
                self._ended.at_work = self._workers.running > 0
                self._ended.between_rounds = self._phase in (_Phase.STOPPING, _Phase.PARKED)
                trace.mark("leaving")
                self._member.link.send(Leaving(signum), now)
                self._end_by_grace(now)
            elif signum == signal.SIGINT:
                self._workers.kill_by(now)  # a second Ctrl-C means it

    def _end_by_grace(self, now: float) -> None:
        """Kill the workers still running near the end of the grace period."""
        grace = self._config.env.grace_seconds
        self._workers.kill_by(now + max(0.5, grace - max(1.0, grace / 10)))

    def _warn_of_early_ends(self, now: float) -> None:
        """Warn of ranks here or elsewhere that ended with 0 long ago, once a round."""
        hub = self._member.hub
        exits, running = hub.others if hub is not None else ([], 0)
        if not self._warned and not self._workers.stopping:
            warning = root_cause.ended_long_ago(
                [*self._workers.exits, *exits],
                self._workers.running + running,
                self._config.env.deadlines.step,
                now,
            )
            if warning:
                self._warned = True
                self._log.say(warning)

    # --- Rounds --------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        """Report new exits to the hub."""
        workers = self._workers
        if self._phase is not _Phase.RUNNING or self._reported == len(workers.exits):
            return
        self._reported = len(workers.exits)
        if workers.failed:
            trace.mark("failed")
            self._member.link.send(
                Failed(workers.round, tuple(workers.exits), workers.running), now
            )
            self._ended.waiting_since = self._ended.waiting_since or now
        elif workers.succeeded:
            self._enter(_Phase.SUCCEEDED, now)
            self._member.link.send(Done(workers.round, tuple(workers.exits)), now)

    def _take_messages(self, now: float) -> None:
        """Do as the hub's messages say."""
        link = self._member.link
        while link.inbox:
            self._handle(link.inbox.popleft(), now)
        self._check_hub(now)

    def _check_hub(self, now: float) -> None:
        """Look for another hub when this one is lost (L3), or end the attempt.

        A failure here before that counts as the cause then.
        """
        ended, link = self._ended, self._member.link
        lost = link.lost
        if link.linked:
            self._linked_at = now
        # While ranks train, rank 0's launcher runs: a hub not met by now is lost.
        failed = self._phase is _Phase.RUNNING and ended.waiting_since
        asking = failed or self._phase is _Phase.SUCCEEDED
        if link.unmet and asking and self._workers.is_training():
            lost = lost or link.unmet
        overdue = self._is_overdue(now)
        if overdue:
            lost = lost or "it does not answer"
        if not lost or ended.lost or self._finished:
            return
        if self._config.env.standby and not ended.end:  # another may serve it soon: do not save
            self._workers.stop(now, last_words=0)
        in_time = not overdue or self._phase is _Phase.RUNNING
        over = ended.signal or ended.end or self._phase is _Phase.SUCCEEDED
        if self._config.holds and link.met and in_time and not over:
            self._leave_hub(lost, now)
            return
        self._abandon()
        ended.lost = lost
        ended.before_loss = root_cause.first_failure(self._workers.exits)
        self._end_attempt(now)

    def _is_overdue(self, now: float) -> bool:
        """Return whether the hub, or what has to end here, has taken too long."""
        since, patience = self._ended.waiting_since, _ANSWER_SECONDS
        if self._phase is not _Phase.RUNNING:
            # Here or elsewhere processes take so long to end.
            since, patience = self._since, patience + self._config.exit_seconds
        if self._phase is _Phase.STOPPING:
            since = max(since, self._workers.kill_at or since)
        if self._phase is _Phase.PARKED and (self._config.holds or not self._began):
            since = max(since, self._linked_at)  # as long as there is a hub, it decides
            patience = max(patience, self._config.hold_seconds)
        waits = since and self._ended.end is None and self._phase is not _Phase.SUCCEEDED
        return bool(waits) and now - since > patience

    def _leave_hub(self, lost: str, now: float) -> None:
        """Leave a lost hub, and find the next one as soon as nothing runs here (L2)."""
        link = self._member.link
        self._log.say(f"the hub was lost: {lost}; waiting for it or for another one")
        link.leave()
        self._evidence.why = f"the hub was lost: {lost}"
        if self._phase is _Phase.RUNNING:
            self._enter(_Phase.STOPPING, now)
            self._workers.stop(now, last_words=0)
        elif self._phase is _Phase.PARKED:
            link.join()
        self._abandon()

    def _abandon(self) -> None:
        """Count no success of a round that was stopped: a standby may serve the replica by now."""
        stopped = self._phase in (_Phase.STOPPING, _Phase.PARKED)
        self._ended.abandoned |= self._config.env.standby > 0 and stopped

    def _handle(self, message: Message, now: float) -> None:
        workers = self._workers
        if isinstance(message, Stop):
            runs = self._phase in (_Phase.RUNNING, _Phase.SUCCEEDED)
            if message.round == workers.round and runs and not self._ended.signal:
                self._enter(_Phase.STOPPING, now)
                if message.graceful:
                    self._end_by_grace(now)  # with the launcher that leaves
                else:
                    last_words = 0 if self._member.rounds else _LAST_WORDS_SECONDS
                    workers.stop(now, last_words=last_words)
        elif isinstance(message, Go):
            parked = self._phase is _Phase.PARKED and not self._ended.signal
            if parked and message.key > workers.key:  # L4
                self._next_round(message, now)
        elif isinstance(message, End):
            self._ended.end = message
            self._abandon()
            if message.graceful:
                self._end_by_grace(now)
            else:
                self._end_attempt(now)
        elif isinstance(message, Finished):
            self._finished = True
            parked = self._phase is _Phase.PARKED
            self._ended.stood_by = parked and (not workers.succeeded or self._ended.abandoned)

    def _end_attempt(self, now: float) -> None:
        """Stop the workers after short last words: no round follows."""
        trace.mark("ended")
        if not self._workers.stopping and not self._ended.signal:
            self._workers.stop(now, last_words=_LAST_WORDS_SECONDS)

    def _stop_the_rest(self, now: float) -> None:
        """Stop workers that lost their peers after another launcher's end."""
        workers = self._workers
        over = self._ended.end is not None or self._phase is _Phase.STOPPING
        if over and workers.failed and not workers.stopping:
            workers.stop(now, last_words=_LAST_WORDS_SECONDS)

    def _report_stopped(self, now: float) -> None:
        """Report Stopped once the round's processes are gone; until then report Exiting."""
        workers, link = self._workers, self._member.link
        if self._phase is not _Phase.STOPPING:
            return
        if not workers.is_gone(self._starter.spares.pids()):
            since = max(
                self._since, workers.kill_at or 0.0
            )  # they may end by themselves until then
            patient = now - since < self._config.exit_seconds
            if patient and now - max(self._since, self._exiting_reported) >= _EXITING_SECONDS:
                self._exiting_reported = now
                link.send(Exiting(workers.round), now)
            return
        self._counted.teardown_seconds = now - self._since
        self._enter(_Phase.PARKED, now)
        trace.mark("stopped")
        self._results = self._results.after(workers)
        self._progress.poll(_POLL_SECONDS)  # the hub decides on it
        step = self._results.snapshot_step
        link.send(Stopped(workers.round, tuple(workers.exits), step), now)
        link.join()
        self._evidence.stopped(self._member.hub)

    def _next_round(self, go: Go, now: float) -> None:
        if go.records:
            last = go.records[-1]
            kind = last.get("kind", "peerLost")
            self._log.say(f"round {go.round}: {_reason(last)}; restarting in place")
            self._events.write("drill" if kind == "drill" else "failure", **last)
            self._counted.rounds[kind] += 1
        elif self._config.env.replacement or go.number > self._config.attempt:
            self._log.say(f"round {go.round}: the hub was replaced, by hub {go.number}")
        trace.mark("go")
        self._evidence.follows(go.records)
        if go.replica != self._config.replica and self._config.hub_port is not None:
            self._log.say(f"this pod serves replica {go.replica} from now on")
            self._config = replace(self._config, replica=go.replica)
            self._starter.serve(self._config)
        self._starter.go_on(go.newest)
        self._results = replace(self._results, records=go.records)
        self._ended.waiting_since = 0.0
        old = self._workers.state_dir
        self._counted.round = go.round
        self._begin(go.key, now)
        forget_dead(self._runtime_dir.metrics)
        shutil.rmtree(old, ignore_errors=True)

    # --- End -----------------------------------------------------------------------------

    def _is_finished(self, now: float) -> bool:
        ended = self._ended
        if self._workers.running:
            return False
        if self._phase is _Phase.SUCCEEDED:
            hub = self._member.hub
            needed = hub is not None and hub.needed
            waited = now - self._since > _SUCCESS_SECONDS and not needed
            return bool(self._finished or ended.end or ended.lost or ended.signal or waited)
        return bool(self._finished or ended.signal or ended.end is not None or ended.lost)

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


def _reason(last: Round) -> str:
    """Word why a round follows, by the record of the one before."""
    if last.get("kind") == "drill":
        return f"a drill after step {last['step']}, as planned"
    if last.get("kind") == "lost":
        return f"the launcher of replica {last['replica']} was lost"
    what = "a process ended" if "rank" not in last else f"rank {last['rank']} ended"
    return f"{what} ({root_cause.in_words(last)})"
