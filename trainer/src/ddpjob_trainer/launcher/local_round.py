"""Play this launcher's part in a round: it runs, is stopped, waits for the next, or succeeds.

The supervisor's loop calls the present phase, which tells the hub what happens here, does as the
hub says, and answers with the phase that follows; the gang's phases are hub/hub.py's. L2 to L4 are
rules of the protocol by which launchers follow a hub that replaces another.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from ddpjob_trainer import trace
from ddpjob_trainer.launcher.host import ENDING
from ddpjob_trainer.launcher.hub import messages, root_cause
from ddpjob_trainer.launcher.hub.membership import Membership
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.printed import Pace
from ddpjob_trainer.launcher.reports.termination import Ended
from ddpjob_trainer.launcher.rescue import MOST_SECONDS, Rescuer
from ddpjob_trainer.launcher.worker_group import WorkerGroup

#: When no round can follow: seconds for a worker's last output after another one failed.
_LAST_WORDS_SECONDS = 1.0
#: The hub answers a failure in milliseconds; a barrier takes as long as processes take to end.
_ANSWER_SECONDS = 10.0
#: Between two messages to the hub that killed processes have not ended yet.
_EXITING_SECONDS = 1.0
#: A round may need succeeded workers again; the launcher waits so long for it.
_SUCCESS_SECONDS = 60.0
#: A round takes less to begin.
_BEGIN_SECONDS = 1.0


@dataclass(slots=True)
class LocalRound:
    """What belongs to a round in all its phases. ``ended``: why none follows, for all rounds.

    ``hub_lost``: how the hub was lost, which ended it. ``warned``: of ranks that ended early.
    """

    config: LaunchConfig
    workers: WorkerGroup
    member: Membership
    ended: Ended
    say: Callable[[str], None]
    hub_lost: str = ""
    warned: bool = False
    rescuer: Rescuer | None = None  # None: rescues are off
    pace: Pace = field(default_factory=Pace)

    def end_by_grace(self, now: float) -> None:
        """Kill the workers still running near the end of the grace period."""
        grace = self.config.env.grace_seconds
        self.workers.kill_by(now + max(0.5, grace - max(1.0, grace / 10)))

    def end_attempt(self, now: float) -> None:
        """Stop the workers after short last words: no round follows."""
        trace.mark("ended")
        if not self.workers.stopping and not self.ended.signal:
            self.workers.stop(now, last_words=_LAST_WORDS_SECONDS)

    def look(self, now: float) -> None:
        """Note the pace; warn once of ranks here or elsewhere that ended with 0 long ago."""
        workers, hub = self.workers, self.member.hub
        self.pace.poll(workers.state(0), now)
        if self.warned or workers.stopping:
            return
        ends, running = hub.others if hub is not None else ([], 0)
        ends, running = [*workers.exits, *ends], workers.running + running
        patience = self.config.env.deadlines.step
        if warning := root_cause.ended_long_ago(ends, running, patience, now):
            self.warned = True
            self.say(warning)


class Phase:
    """``stopped``: the hub has stopped the round, or was lost, and no other has begun.

    ``waiting_since``: since when the hub knows of a failure in a round that runs, 0: of none.
    """

    stopped = False
    waiting_since = 0.0

    def __init__(self, round_: LocalRound, now: float) -> None:
        self.round, self.since = round_, now

    def forward(self, signum: int, now: float) -> None:
        """Pass a signal on to the workers; say to the hub that this launcher is to end."""
        workers, ended = self.round.workers, self.round.ended
        workers.signal(signum, now)
        if signum not in ENDING:
            return
        if not ended.signal:
            ended.signal = signum
            ended.at_work = workers.running > 0
            ended.between_rounds = self.stopped
            trace.mark("leaving")
            self.round.member.link.send(messages.Leaving(signum), now)
            self.round.end_by_grace(now)
        elif signum == signal.SIGINT:
            workers.kill_by(now)  # a second Ctrl-C means it

    def stop_the_rest(self, now: float) -> None:
        """Stop workers that lost their peers after another launcher's end."""
        workers = self.round.workers
        over = self.round.ended.end is not None or isinstance(self, Stopping)
        if over and workers.failed and not workers.stopping:
            workers.stop(now, last_words=_LAST_WORDS_SECONDS)

    def is_over(self, now: float) -> bool:
        """Return whether this launcher's part is done."""
        return self.round.ended.over and not self.round.workers.running

    def begins(self, go: messages.Go) -> bool:
        """Return whether a round begins here at the hub's word: a newer one, while parked (L4)."""
        parked = isinstance(self, Parked) and not self.round.ended.signal
        return parked and go.key > self.round.workers.key

    def handle(self, message: messages.Message, now: float) -> Phase:
        """Do as any other of the hub's messages says."""
        round_, ended = self.round, self.round.ended
        rescuer = round_.rescuer
        if isinstance(message, messages.Stop) and message.rescue == "word":
            if rescuer is not None and message.round == round_.workers.round:
                rescuer.agree(message.word)
        elif isinstance(message, messages.Stop):
            if message.round == round_.workers.round and not (self.stopped or ended.signal):
                if message.graceful:
                    round_.end_by_grace(now)  # with the launcher that leaves
                elif not (
                    message.rescue and rescuer and rescuer.begin(message.rescue, now, message.word)
                ):
                    last_words = 0 if round_.member.rounds else _LAST_WORDS_SECONDS
                    round_.workers.stop(now, last_words=last_words)
                return Stopping(round_, now)
        elif isinstance(message, messages.Ask):
            if message.round == round_.workers.round and isinstance(self, Running):
                trace.mark("asked")
                round_.workers.signal(signal.SIGTERM, now)
        elif isinstance(message, messages.End):
            ended.end = message
            self._abandon()
            if message.graceful:
                round_.end_by_grace(now)
            else:
                round_.end_attempt(now)
        elif isinstance(message, messages.Finished):
            ended.finished, ended.number = True, round_.member.link.number
            succeeded = round_.workers.succeeded and not ended.abandoned
            ended.stood_by = isinstance(self, Parked) and not succeeded
        return self

    def _abandon(self) -> None:
        """Count no success of a round that was stopped: another may serve the replica by now."""
        self.round.ended.abandoned |= self.round.config.env.reseats and self.stopped

    def check_hub(self, now: float) -> Phase:
        """Look for another hub when this one is lost (L3), or end the attempt.

        The next hub is found once nothing runs here (L2). A failure here before the attempt ends
        counts as its cause.
        """
        round_, ended, link = self.round, self.round.ended, self.round.member.link
        lost = link.lost
        # While ranks train, rank 0's launcher runs: a hub not met by now is lost.
        asks = self.waiting_since or isinstance(self, Succeeded)
        if link.unmet and asks and round_.workers.is_training():
            lost = lost or link.unmet
        until = self._hub_answers_by()
        overdue = until is not None and ended.end is None and now > until
        if overdue:
            lost = lost or "it does not answer"
        if not lost or ended.lost or ended.finished:
            return self
        if round_.config.env.reseats and not ended.end:  # another may serve it soon: do not save
            round_.workers.stop(now, last_words=0)
        over = ended.signal or ended.end or isinstance(self, Succeeded)
        # Nobody chooses who saves: it is replica 1, where no other worker need be asked.
        saves = round_.rescuer if round_.config.replica == 1 and not over else None
        in_time = not overdue or isinstance(self, Running)
        if round_.config.holds and link.met and in_time and not over:
            round_.say(f"the hub was lost: {lost}; waiting for it or for another one")
            link.leave()
            round_.hub_lost = f"the hub was lost: {lost}"
            if isinstance(self, Parked):
                link.join()
            if not (self.stopped or (saves is not None and saves.begin("alone", now))):
                round_.workers.stop(now, last_words=0)
            following = self if self.stopped else Stopping(round_, now)
            following._abandon()
            return following
        self._abandon()
        ended.lost = lost
        ended.before_loss = root_cause.first_failure(round_.workers.exits)
        if saves is not None and not self.stopped:
            saves.begin("alone", now)
        round_.end_attempt(now)
        return self

    def _hub_answers_by(self) -> float | None:
        """Return when the hub, or what has to end here, will have taken too long."""
        return None


class Running(Phase):
    """Its workers run."""

    reported = 0  # exits that the hub knows of

    def report(self, now: float) -> Phase:
        """Say that workers failed, or that all have succeeded."""
        workers, link = self.round.workers, self.round.member.link
        if self.reported == len(workers.exits):
            return self
        self.reported, exits = len(workers.exits), tuple(workers.exits)
        if workers.failed:
            trace.mark("failed")
            link.send(messages.Failed(workers.round, exits, workers.running), now)
            self.waiting_since = self.waiting_since or now
        elif workers.succeeded:
            link.send(messages.Done(workers.round, exits), now)
            return Succeeded(self.round, now)
        return self

    def _hub_answers_by(self) -> float | None:
        return self.waiting_since + _ANSWER_SECONDS if self.waiting_since else None


class Stopping(Phase):
    """The hub said Stop, or was lost: what runs here ends."""

    stopped = True

    def __init__(self, round_: LocalRound, now: float) -> None:
        super().__init__(round_, now)
        self._reported_at = now  # when the hub last heard that processes have not ended

    def report_exiting(self, now: float) -> None:
        """Say from time to time that killed processes have not ended yet."""
        killed_at = max(self.since, self.round.workers.kill_at or 0.0)
        patient = now - killed_at < self.round.config.exit_seconds
        if patient and now - self._reported_at >= _EXITING_SECONDS:
            self._reported_at = now
            self.round.member.link.send(messages.Exiting(self.round.workers.round), now)

    def report_stopped(self, snapshot_step: int, now: float) -> Parked:
        """Say that all processes of the round are gone."""
        workers, link = self.round.workers, self.round.member.link
        link.send(messages.Stopped(workers.round, tuple(workers.exits), snapshot_step), now)
        link.join()
        return Parked(self.round, now)

    def _hub_answers_by(self) -> float | None:
        killed_at = max(self.since, self.round.workers.kill_at or 0.0)
        return killed_at + _ANSWER_SECONDS + self.round.config.exit_seconds


class Parked(Phase):
    """Nothing runs here; linked or not, it waits for the hub's Go."""

    stopped = True

    def __init__(self, round_: LocalRound, now: float) -> None:
        super().__init__(round_, now)
        self._linked_at = now  # when the hub was there last
        self._said = False

    def check_hub(self, now: float) -> Phase:
        """Wait as long as there is a hub: it decides."""
        if self.round.member.link.linked:
            self._linked_at = now
        return super().check_hub(now)

    def is_idle(self, now: float) -> bool:
        """Return whether it waits for longer than a round takes to begin; say so once."""
        idle = now - self.since > _BEGIN_SECONDS
        if idle and not self._said:
            env, linked = self.round.config.env, self.round.member.link.linked
            what = (
                "a pod to replace" if env.standby and linked else "the other launchers to connect"
            )
            what = "the next round" if env.elastic and linked else what
            self.round.say(f"waiting for {what}; no worker runs in this pod yet")
        self._said = idle
        return idle

    def _hub_answers_by(self) -> float | None:
        config = self.round.config
        patience = _ANSWER_SECONDS + config.exit_seconds
        if self.round.rescuer is not None:  # a worker elsewhere may write so long
            patience += MOST_SECONDS
        if config.holds or self.round.workers.key.round < 0:
            return self._linked_at + max(patience, config.hold_seconds)
        return self.since + patience


class Succeeded(Phase):
    """All workers ended with 0, and the hub knows."""

    def is_over(self, now: float) -> bool:
        """Wait for the others a while: a round may need these workers again."""
        hub = self.round.member.hub
        needed = hub is not None and hub.needed
        return super().is_over(now) or (now - self.since > _SUCCESS_SECONDS and not needed)
