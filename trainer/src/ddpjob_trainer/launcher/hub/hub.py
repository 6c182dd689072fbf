"""Stop a round at all launchers, and start the next when all have stopped.

The hub runs in launcher 0, without sockets: membership.py and server.py pass it the launchers'
messages, and it posts answers. rounds.py decides what follows. Where a launcher is lost the others
hold until its place is filled: by a standby, a new pod, or the same one after a broken
link. A launcher has its pod's seat for life; the replica that it serves is said with each Go. H1 to
H3 are rules of the protocol for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum

from ddpjob_contract import STATE_MAX_AWAY, Round
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
    is_of_the_job,
)
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.rounds import History, Limits, Loss

#: From Stop, or from a launcher's last Exiting, until all have ended.
BARRIER_SECONDS = 5.0
#: The supervisor's loop calls at least this often. A longer pause means that the hub's launcher
#: itself was stopped, and read no messages.
_POLL_SECONDS = 1.0

_Post = Callable[[int, Message], None]


class _Phase(Enum):
    RUNNING = "running"
    STOPPING = "stopping"  # Stop was sent to all; not all have stopped
    HOLDING = "holding"  # all that are here have stopped; others are missing
    FINISHED = "finished"


class Hub:
    """``own``: the Hello of the hub's own launcher, to which all others must fit; its birth is the
    hub's number. If a round runs there the whole gang begins with this hub, else it replaces one.

    ``limits``: see rounds.decide. ``modified``: asks for the newest mtime at the progress path;
    must not block. ``drop``: closes a launcher's link. ``newest``: asks for the checkpoint from
    which all go on, "" for none; None: it is still being looked for. It hears whether the program
    failed by itself.
    """

    def __init__(
        self,
        own: Hello,
        limits: Limits,
        post: _Post,
        modified: Callable[[], int] = lambda: -1,
        drop: Callable[[int], None] = lambda seat: None,
        newest: Callable[..., str | None] = lambda **_: "",
    ) -> None:
        self.history = History(round=0 if own.running else -1)
        self.holds = False  # every launcher has come, and can wait for the place of a lost one
        self._own = own
        self._limits = limits
        self._post = post
        self._modified = modified
        self._drop = drop
        self._newest = newest
        self._begun_at: float | None = None  # when the round began
        self._phase = _Phase.RUNNING if own.running else _Phase.HOLDING
        #: The seat that serves each replica in this round; empty before the first of a hub that
        #: replaces one. _fill() chooses them; all sets here, and what is said, are of seats.
        self._serving: tuple[int, ...] = tuple(range(own.replicas)) if own.running else ()
        self._members: dict[int, Hello] = {}  # the newest ever admitted
        self._present: set[int] = set()  # admitted and not lost
        self._leaving: set[int] = set()  # present, but about to end
        self._stopped: set[int] = set()  # present, and nothing of the gang runs there
        self._out: set[str] = set()  # pods that others have replaced
        self._final: Message | None = None
        self.gone: dict[int, str] = {}  # replicas lost in the round ``gone_in``, and how
        self.gone_in = -1
        self._polled = 0.0
        self._begin()

    def _begin(self) -> None:
        self._exits: dict[int, Exit] = {}  # by rank
        self._running: dict[int, int] = {}  # by seat, of those that said so
        self._stopped.difference_update(self._serving)
        self._done: set[int] = set()
        self._snapshot_step = -1
        self._stop_at = 0.0
        self._barrier_at: float | None = None
        self._lost: dict[int, str] = {}  # replicas whose launchers were lost in this round -> pods
        self._lost_first = False  # a loss, and no worker's failure, ended the round
        self._hold_until: float | None = None

    @property
    def needed(self) -> bool:
        """Return whether another connected launcher, still running, needs the hub."""
        busy = self._present.intersection(self._serving) - self._done - {0}
        return self._phase is not _Phase.FINISHED and bool(busy)

    def is_present(self, seat: int) -> bool:
        """Return whether a launcher is linked to the hub."""
        return seat in self._present

    @property
    def waits(self) -> bool:
        """Return whether it waits for launchers that are missing."""
        return self._phase is _Phase.HOLDING

    @property
    def complete(self) -> bool:
        """Return whether a round has begun and every pod of the job is linked."""
        everybody = self._own.replicas + self._own.standby
        return self.history.round >= 0 and len(self._present) == everybody

    @property
    def serving(self) -> str:
        """Return replica:seat where the two differ, from another thread, too."""
        return ",".join(f"{r}:{seat}" for r, seat in enumerate(self._serving) if r != seat)

    @property
    def away(self) -> list[int]:
        """Return the seats that were linked and are not now, from another thread, too."""
        if self._phase is _Phase.FINISHED:
            return []
        return sorted(self._members.keys() - self._present)[:STATE_MAX_AWAY]

    @property
    def others(self) -> tuple[list[Exit], int]:
        """Return the ends with 0 at other launchers, and how many ranks run there."""
        if self._phase is not _Phase.RUNNING or self._own.replicas == 1:
            return [], 0
        nproc, done = self._own.nproc, self._done - {0}
        ends = [one for one in self._exits.values() if self._serving[one.rank // nproc] in done]
        return ends, (self._own.replicas - 1 - len(done)) * nproc

    # --- Who comes and goes --------------------------------------------------------------

    def refuses(self, hello: Hello) -> Refused | None:
        """Return why a launcher is not admitted, None if it can be (H1)."""
        mine, seat = self._own, hello.seat
        if hello.uid != mine.uid:
            return Refused("this hub belongs to another job", final=False)
        if not is_of_the_job(hello, mine.token):
            return Refused("this launcher does not know the secret of the hub's job", final=False)
        # With a hub that replaces one, older launchers are welcome once they have stopped.
        older = hello.birth < mine.birth and (mine.running or hello.running)
        if older or (hello.birth > mine.birth and hello.running):
            final = older and (mine.running or not hello.holds)
            return Refused(f"this hub belongs to attempt {mine.birth}", final)
        if _sizes(hello) != _sizes(mine):
            return Refused(f"here are {_sizes(mine)}, there {_sizes(hello)}", final=True)
        seats = mine.replicas + (0 if hello.running else mine.standby)
        if not 0 <= seat < seats:
            return Refused(f"replica {seat} is not one of {seats}", final=True)
        known = self._members.get(seat)
        if known is None:
            return None
        if hello.pod in self._out or hello.birth < known.birth:  # H3
            return Refused("this pod has been replaced by another one", final=True)
        back = hello.pod == known.pod and not hello.running and seat not in self._present
        holds = self.holds or self._phase is _Phase.HOLDING
        if seat > 0 and (hello.birth > known.birth or (back and holds)):
            return None
        return Refused(f"replica {seat} has been admitted before", final=False)

    def admit(self, hello: Hello, now: float) -> None:
        """Take in a launcher that is not refused: in the round that runs, or parked."""
        seat = hello.seat
        if seat in self._present:  # of an older pod
            self.lost(seat, now)
        known = self._members.get(seat)
        if known is not None and known.pod != hello.pod:
            self._out.add(known.pod)
        self._members[seat] = hello
        self._present.add(seat)
        self.holds = (
            self._limits.budget > 0
            and len(self._members) >= self._own.replicas
            and self._members.keys() >= set(self._serving)
            and all(one.holds for one in self._members.values())
        )
        self._post(seat, Welcome(self._own.birth, self._own.pod))
        if self._final is not None:
            self._post(seat, self._final)
        elif not hello.running:
            # Its predecessor never came, or was done.
            if self._phase is _Phase.RUNNING and seat in self._serving:
                self._lost[self._serving.index(seat)] = known.pod if known is not None else ""
                self._vacate(seat, now, "has been replaced")
            self._stopped.add(seat)
            self.tick(now)
        elif self._phase is _Phase.STOPPING:
            self._post(seat, Stop(self.history.round))

    def lost(self, seat: int, now: float) -> None:
        """Go on without a launcher whose connection is gone, or end."""
        self._present.discard(seat)
        self._leaving.discard(seat)
        succeeded = self._phase is _Phase.RUNNING and seat in self._done
        if succeeded or self._phase is _Phase.FINISHED:
            return  # but no round can follow without it
        self._vacate(seat, now, "was lost")

    def _vacate(self, seat: int, now: float, how: str, *, graceful: bool = False) -> None:
        """Hold until the place of a launcher is filled (H2); end if the gang cannot hold."""
        self._stopped.discard(seat)
        if seat not in self._serving:
            return  # it stood by
        self._lose(seat, now, how)
        if self._phase is _Phase.HOLDING:
            return
        if not self.holds:
            replica = self._serving.index(seat)
            why = f"the launcher of replica {replica} {how}"
            cause = root_cause.first_failure(self._exits.values())
            mine = cause is None or graceful or cause.rank // self._own.nproc == replica
            self._end(self._because(None if mine else cause, why, graceful=graceful))
        elif self._phase is _Phase.RUNNING:
            self._stop(now, graceful=graceful)
        else:
            self.tick(now)

    def _lose(self, seat: int, now: float, how: str) -> None:
        replica = self._serving.index(seat)
        self._lost.setdefault(replica, self._members[seat].pod)
        self._note_gone(replica, how)
        if self._hold_until is None:
            self._hold_until = now + self._limits.hold

    def _note_gone(self, replica: int, how: str) -> None:
        """Note for evidence.py who was lost in this round, until another round loses some."""
        if self.gone_in != self.history.round:
            self.gone_in, self.gone = self.history.round, {}
        self.gone.setdefault(replica, how)

    # --- What launchers say --------------------------------------------------------------

    def receive(self, seat: int, message: Message, now: float) -> None:
        """Handle an admitted launcher's message. Raise ValueError for what it must not say."""
        self._allow_for_pause(now)
        if self._phase is _Phase.FINISHED:
            return
        if isinstance(message, Leaving):
            self._leave(seat, now)
            return
        if not isinstance(message, Failed | Exiting | Stopped | Done):
            raise ValueError(f"a launcher must not say {type(message).__name__}")
        if message.round != self.history.round or seat not in self._serving:
            return
        if isinstance(message, Exiting):
            if self._barrier_at is not None:
                self._barrier_at = now + BARRIER_SECONDS
            return
        self._note(seat, message.exits, now)
        if isinstance(message, Done):
            self._done.add(seat)
        if self._has_succeeded():
            self._end(Finished())
        elif isinstance(message, Done):
            return
        elif isinstance(message, Failed):
            self._running[seat] = message.running
        elif self._phase is _Phase.STOPPING and seat not in self._leaving:
            self._stopped.add(seat)
            self._done.discard(seat)
            self._snapshot_step = max(self._snapshot_step, message.snapshot_step)
        self.tick(now)

    def _leave(self, seat: int, now: float) -> None:
        """Let the others save together with a launcher that got a signal to end."""
        if seat not in self._done:
            self._leaving.add(seat)
            self._vacate(seat, now, "was told to end", graceful=True)
        elif seat != 0 and self._phase is _Phase.RUNNING:
            self._present.discard(seat)  # it may go, but no round can follow without it
        else:
            why = f"the launcher of replica {self._serving.index(seat)} was told to end"
            self._end(self._because(None, why, graceful=True))

    def _note(self, seat: int, exits: tuple[Exit, ...], now: float) -> None:
        """Record exits by the hub's clock: the launchers' clocks cannot be compared."""
        nproc, replica = self._own.nproc, self._serving.index(seat)
        for exit_ in exits:
            # Without rounds the hub hears its own launcher only, whose ranks are the gang's.
            if self._own.replicas > 1 and exit_.rank // nproc != replica:
                raise ValueError(f"rank {exit_.rank} is not of replica {replica}")
            known = self._exits.get(exit_.rank)
            if known is None:
                said = exit_.exception[:400]
                self._exits[exit_.rank] = replace(exit_, at=now, exception=said)

    def _has_succeeded(self) -> bool:
        """Return whether all have, also beside a launcher that leaves after the last step.

        Else some programs save and end with 0 together, unfinished.
        """
        ends, size = self._exits.values(), self._own.replicas
        finished = all(one.done and not one.status for one in ends)
        return len(self._done) == size or (finished and len(ends) == size * self._own.nproc)

    # --- What follows --------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Do the next due action; return when to call again at the latest."""
        self._allow_for_pause(now)
        if self._begun_at is None:
            self._begun_at = now
        if self._phase is _Phase.RUNNING:
            return self._stop_when_due(now)
        if self._phase is _Phase.STOPPING:
            return self._wait_for_all(now)
        if self._phase is _Phase.HOLDING:
            return self._hold(now)
        return None

    def _allow_for_pause(self, now: float) -> None:
        """Move the barrier by the hub's own pause: messages sent meanwhile are unread."""
        pause = now - self._polled - _POLL_SECONDS
        if self._barrier_at is not None and pause > 0:
            self._barrier_at += pause
        self._polled = now

    def _stop_when_due(self, now: float) -> float | None:
        silent = self._own.replicas - len(self._running)
        running = sum(self._running.values()) + silent * self._own.nproc
        found = root_cause.cause_or_wait(
            tuple(self._exits.values()), running, now, rounds=self._limits.budget > 0
        )
        if found is None or isinstance(found, float):
            return found
        self._stop(now)
        return self._barrier_at

    def _stop(self, now: float, *, graceful: bool = False) -> None:
        if not self._done <= self._present:
            cause = root_cause.first_failure(self._exits.values())
            why = "a launcher whose workers had succeeded is gone"
            self._end(self._because(cause, why, graceful=graceful))
            return
        self._lost_first = self._loss() is not None
        self._phase = _Phase.STOPPING
        self._stop_at = now
        self._barrier_at = now + BARRIER_SECONDS
        self._tell_all(Stop(self.history.round, graceful))

    def _wait_for_all(self, now: float) -> float | None:
        """Wait until every launcher has stopped (H2)."""
        everybody = self._present - self._leaving if self.holds else set(self._serving)
        missing = everybody - self._stopped
        if not missing:
            self._decide(now)
            return None
        assert self._barrier_at is not None
        if now < self._barrier_at:
            return self._barrier_at
        if self.holds and 0 not in missing:
            for seat in missing:
                self._drop(seat)
                self._present.discard(seat)
                self._lose(seat, now, "did not stop its processes in time")
            self._decide(now)
            return None
        absent = missing - self._members.keys()
        which = ", ".join(map(str, sorted(absent or missing)[:8]))
        what = "has not come to the hub" if absent else "did not stop"
        cause = root_cause.first_failure(self._exits.values())
        took = now - self._stop_at
        self._end(self._because(cause, f"replica {which} {what} within {took:.0f} s"))
        return None

    def _hold(self, now: float) -> float | None:
        """Wait until every place is filled by a launcher that has stopped."""
        if self._hold_until is None:  # the first look of a hub that replaces one
            self._hold_until = now + self._limits.hold
        missing = sorted(set(range(self._own.replicas)) - self._fill().keys())
        if not missing:
            self._decide(now)
        elif now >= self._hold_until:
            which = ", ".join(map(str, missing[:8]))
            why = f"replica {which} was not replaced within {self._limits.hold:.0f} s"
            self._end(self._because(None, why))
        return self._hold_until

    def _decide(self, now: float) -> None:
        """Begin the next round, hold for missing launchers, or end."""
        following = History()
        if self.history.round >= 0:
            assert self._begun_at is not None
            decision = rounds.decide(
                self.history,
                self._exits.values(),
                self._snapshot_step,
                self._limits,
                modified=self._modified(),
                lasted=self._stop_at - self._begun_at,
                nproc=self._own.nproc,
                at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                loss=self._loss(),
            )
            if decision.next is None:
                self._end(replace(self._because(decision.cause, decision.why), code=decision.code))
                return
            following = decision.next
        filled = self._fill()
        if len(filled) < self._own.replicas:
            self._phase = _Phase.HOLDING
            return
        # One answer for all: ranks that went on from other checkpoints would train apart.
        last = following.records[-1] if following.records else Round()
        failed = last.get("kind") in ("exception", "exit")
        if (newest := self._newest(failed=failed)) is None:
            return  # asked again at the next tick
        self._out.update(set(self._lost.values()) - self._pods_here())
        self._serving = tuple(filled[replica] for replica in range(self._own.replicas))
        self.history = following
        self._phase = _Phase.RUNNING
        self._begun_at = None
        self._begin()
        for replica, seat in enumerate(self._serving):
            go = Go(self._own.birth, following.round, replica, following.records, newest)
            self._post(seat, go)

    def _fill(self) -> dict[int, int]:
        """Choose who serves next: a seat for each replica, of those where nothing runs (H2).

        Replica 0 is the hub's own. Who serves one goes on with it; then comes who held it last,
        then a new pod of its seat, then the lowest standby. The place of one that leaves is free
        when it has left, for till then its workers may run.
        """
        serving = {seat: replica for replica, seat in enumerate(self._serving)}
        held = {seat: self._members[seat].held for seat in self._stopped}
        own = {seat: seat for seat in self._stopped}
        filled = {0: 0} if 0 in self._stopped else {}
        idle = self._stopped - {0}
        busy = {replica for seat, replica in serving.items() if seat in self._leaving}
        free = set(range(1, self._own.replicas)) - busy
        for wish in (serving, held, own):
            for seat in sorted(idle & wish.keys()):
                if wish[seat] in free:
                    free.remove(wish[seat])
                    idle.remove(seat)
                    filled[wish[seat]] = seat
        return filled | dict(zip(sorted(free), sorted(idle), strict=False))

    def _pods_here(self) -> set[str]:
        """Return the pods of the launchers that are linked and where nothing runs."""
        return {self._members[seat].pod for seat in self._stopped}

    def _loss(self) -> Loss | None:
        """Return the loss that ended the round, None if a worker's failure did."""
        if not self._lost:
            return None
        cause = root_cause.first_failure(self._exits.values())
        collateral = cause is None or cause.lost_peer or cause.rank // self._own.nproc in self._lost
        if not collateral and not self._lost_first:
            return None
        back = self._pods_here().issuperset(self._lost.values())
        return Loss(next(iter(self._lost)), replaced=not back)

    def _because(self, cause: Exit | None, why: str, *, graceful: bool = False) -> End:
        early = root_cause.ended_early(self._exits.values(), cause)
        rank = cause.rank if cause is not None else -1
        return End(rank, why, graceful=graceful, early=early)

    def _end(self, message: End | Finished) -> None:
        self._phase = _Phase.FINISHED
        self._final = message
        self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        # The hub's own launcher last: the others' messages must be on their way when it ends.
        for seat in sorted(self._present, reverse=True):
            self._post(seat, message)


def _sizes(hello: Hello) -> str:
    """Word what must be the same at all launchers."""
    standby = f" and {hello.standby} that stand by" if hello.standby else ""
    return f"{hello.replicas} replicas of {hello.nproc} processes{standby}"
