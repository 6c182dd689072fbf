"""Stop a round at all launchers, and start the next when all have stopped.

The hub runs in launcher 0, without sockets: membership.py and server.py pass it the launchers'
messages, and it posts answers. rounds.py decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum

from ddpjob_trainer.launcher.hub import root_cause, rounds
from ddpjob_trainer.launcher.hub.messages import (
    Done,
    End,
    Exiting,
    Failed,
    Finished,
    Go,
    Hello,
    Leaving,
    Message,
    Refused,
    Stop,
    Stopped,
    Welcome,
)
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.rounds import History, Limits

#: From Stop, or from a launcher's last Exiting, until all have ended.
BARRIER_SECONDS = 5.0
#: The supervisor's loop calls at least this often. A longer pause means that the hub's launcher
#: itself was stopped, and read no messages.
_POLL_SECONDS = 1.0

_Post = Callable[[int, Message], None]


class _Phase(Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class Hub:
    """``gang``: what each launcher's Hello must say. ``limits``: see rounds.decide.

    ``modified``: asks for the newest mtime at the progress path; must not block.
    """

    def __init__(
        self, gang: Hello, limits: Limits, post: _Post, modified: Callable[[], int] = lambda: -1
    ) -> None:
        self.history = History()
        self._gang = gang
        self._limits = limits
        self._post = post
        self._modified = modified
        self._begun_at: float | None = None  # when the round began
        self._phase = _Phase.RUNNING
        self._present: set[int] = set()  # replicas admitted and not lost
        self._admitted: set[int] = set()  # replicas ever admitted
        self._final: Message | None = None
        self._polled = 0.0
        self._begin()

    def _begin(self) -> None:
        self._exits: dict[int, Exit] = {}  # by rank
        self._running: dict[int, int] = {}  # by replica, of those that said so
        self._stopped: set[int] = set()
        self._done: set[int] = set()
        self._snapshot_step = -1
        self._stop_at = 0.0
        self._barrier_at: float | None = None

    @property
    def needed(self) -> bool:
        """Return whether another connected launcher, still running, needs the hub."""
        return self._phase is not _Phase.FINISHED and bool(self._present - self._done - {0})

    @property
    def others(self) -> tuple[list[Exit], int]:
        """Return the ends with 0 at other launchers, and how many ranks run there."""
        if self._phase is not _Phase.RUNNING or self._gang.replicas == 1:
            return [], 0
        nproc, done = self._gang.nproc, self._done - {0}
        ends = [one for one in self._exits.values() if one.rank // nproc in done]
        return ends, (self._gang.replicas - 1 - len(done)) * nproc

    # --- What launchers say --------------------------------------------------------------

    def admit(self, hello: Hello) -> Refused | None:
        """Admit a launcher, once; or return the refusal."""
        mine, theirs = self._gang, hello
        if theirs.uid != mine.uid:
            return Refused("this hub belongs to another job", final=False)
        if theirs.attempt != mine.attempt:
            stale = theirs.attempt < mine.attempt
            return Refused(f"this hub belongs to attempt {mine.attempt}", final=stale)
        if (theirs.replicas, theirs.nproc) != (mine.replicas, mine.nproc):
            return Refused(
                f"here are {mine.replicas} replicas of {mine.nproc} processes, there"
                f" {theirs.replicas} of {theirs.nproc}",
                final=True,
            )
        if not 0 <= theirs.replica < mine.replicas:
            return Refused(f"replica {theirs.replica} is not one of {mine.replicas}", final=True)
        if theirs.replica in self._admitted:
            return Refused(f"replica {theirs.replica} has been admitted before", final=False)
        self._admitted.add(theirs.replica)
        self._present.add(theirs.replica)
        self._post(theirs.replica, Welcome())
        if self._final is not None:
            self._post(theirs.replica, self._final)
        elif self._phase is _Phase.STOPPING:
            self._post(theirs.replica, Stop(self.history.round))
        return None

    def receive(self, replica: int, message: Message, now: float) -> None:
        """Handle an admitted launcher's message. Raise ValueError for what it must not say."""
        self._allow_for_pause(now)
        if self._phase is _Phase.FINISHED:
            return
        done = replica != 0 and replica in self._done and self._phase is _Phase.RUNNING
        if isinstance(message, Leaving) and done:
            self._present.discard(replica)  # it may go, but no round can follow without it
            return
        if isinstance(message, Leaving):
            self._end(End(-1, f"the launcher of replica {replica} was told to end", graceful=True))
            return
        if not isinstance(message, Failed | Exiting | Stopped | Done):
            raise ValueError(f"a launcher must not say {type(message).__name__}")
        if message.round != self.history.round:
            return
        if isinstance(message, Done):
            self._note(replica, message.exits, now)
            self._done.add(replica)
            if len(self._done) == self._gang.replicas:
                self._end(Finished())
            return
        if isinstance(message, Exiting):
            if self._barrier_at is not None:
                self._barrier_at = now + BARRIER_SECONDS
            return
        self._note(replica, message.exits, now)
        if isinstance(message, Failed):
            self._running[replica] = message.running
        elif self._phase is _Phase.STOPPING:
            self._stopped.add(replica)
            self._snapshot_step = max(self._snapshot_step, message.snapshot_step)
        self.tick(now)

    def lost(self, replica: int, now: float) -> None:
        """End the attempt without a launcher whose connection is gone."""
        self._present.discard(replica)
        if self._phase is _Phase.FINISHED or replica in self._done:
            return
        cause = root_cause.first_failure(self._exits.values()) if self._exits else None
        if cause is None or cause.rank // self._gang.nproc == replica:
            cause = None
        self._end(self._because(cause, f"the launcher of replica {replica} was lost"))

    def _note(self, replica: int, exits: tuple[Exit, ...], now: float) -> None:
        """Record exits by the hub's clock: the launchers' clocks cannot be compared."""
        nproc = self._gang.nproc
        for exit_ in exits:
            # Without rounds the hub hears its own launcher only, whose ranks are the gang's.
            if self._gang.replicas > 1 and exit_.rank // nproc != replica:
                raise ValueError(f"rank {exit_.rank} is not of replica {replica}")
            known = self._exits.get(exit_.rank)
            if known is None:
                said = exit_.exception[:400]
                self._exits[exit_.rank] = replace(exit_, at=now, exception=said)

    # --- What follows --------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Do the next due action; return when to call again at the latest."""
        self._allow_for_pause(now)
        if self._begun_at is None:
            self._begun_at = now
        if self._phase is _Phase.RUNNING:
            return self._stop_when_due(now)
        if self._phase is _Phase.STOPPING:
            if len(self._stopped) == self._gang.replicas:
                self._decide(now - self._begun_at)
                return None
            assert self._barrier_at is not None
            if now < self._barrier_at:
                return self._barrier_at
            missing = set(range(self._gang.replicas)) - self._stopped
            absent = missing - self._admitted
            which = ", ".join(map(str, sorted(absent or missing)[:8]))
            what = "has not come to the hub" if absent else "did not stop"
            cause = root_cause.first_failure(self._exits.values())
            took = now - self._stop_at
            self._end(self._because(cause, f"replica {which} {what} within {took:.0f} s"))
        return None

    def _allow_for_pause(self, now: float) -> None:
        """Move the barrier by the hub's own pause: messages sent meanwhile are unread."""
        pause = now - self._polled - _POLL_SECONDS
        if self._barrier_at is not None and pause > 0:
            self._barrier_at += pause
        self._polled = now

    def _stop_when_due(self, now: float) -> float | None:
        silent = self._gang.replicas - len(self._running)
        running = sum(self._running.values()) + silent * self._gang.nproc
        found = root_cause.cause_or_wait(tuple(self._exits.values()), running, now)
        if found is None or isinstance(found, float):
            return found
        if not self._done <= self._present:
            self._end(self._because(found, "a launcher whose workers had succeeded is gone"))
            return None
        self._phase = _Phase.STOPPING
        self._stop_at = now
        self._barrier_at = now + BARRIER_SECONDS
        self._tell_all(Stop(self.history.round))
        return self._barrier_at

    def _decide(self, lasted: float) -> None:
        decision = rounds.decide(
            self.history,
            self._exits.values(),
            self._snapshot_step,
            self._limits,
            modified=self._modified(),
            lasted=lasted,
            nproc=self._gang.nproc,
            at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        )
        if decision.next is None:
            self._end(self._because(decision.cause, decision.why))
            return
        self.history = decision.next
        self._phase = _Phase.RUNNING
        self._begun_at = None
        self._begin()
        self._tell_all(Go(self.history.round, self.history.records))

    def _because(self, cause: Exit | None, why: str) -> End:
        early = root_cause.ended_early(self._exits.values(), cause)
        rank = cause.rank if cause is not None else -1
        return End(rank, why, graceful=False, early=early)

    def _end(self, message: End | Finished) -> None:
        self._phase = _Phase.FINISHED
        self._final = message
        self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        # The hub's own launcher last: the others' messages must be on their way when it ends.
        for replica in sorted(self._present, reverse=True):
            self._post(replica, message)
