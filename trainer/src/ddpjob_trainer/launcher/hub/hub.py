"""Stop a round at all launchers, and start the next when all have stopped.

The hub runs in launcher 0, without sockets: membership.py and server.py pass it the launchers'
messages, and it posts answers. Its present phase says what follows, with rounds.py, which decides
whether another round does, and seats.py, which chooses who serves. Where a launcher is lost the
others wait until its place is filled: by a standby, a new pod, or the same one after a broken link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ddpjob_contract import STATE_MAX_AWAY, ExitCode, Round
from ddpjob_trainer.launcher.hub import messages, root_cause, rounds
from ddpjob_trainer.launcher.hub.messages import Hello, Message, OfRound
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.hub.rounds import History, Limits, Outcome
from ddpjob_trainer.launcher.hub.seats import Seats
from ddpjob_trainer.launcher.hub.sizes import Sizes, unreached

#: From Stop, or from a launcher's last Exiting, until all have ended.
BARRIER_SECONDS = 5.0
#: A survivor that is to save a step says so in this time, or the others are stopped as well.
RESCUE_SECONDS = 0.3
_MOST_ASKED = 4  # more than die at once; where nobody can, as on GPUs, thousands would be asked
#: The supervisor's loop calls at least this often. A longer pause means that the hub's launcher
#: itself was stopped, and read no messages.
_POLL_SECONDS = 1.0


class Hub:
    """``own``: see Seats. If a round runs there the whole gang begins with this hub, else it
    replaces one.

    ``limits``: see rounds.decide. ``modified``: asks for the newest mtime at the progress path;
    must not block. ``drop``: closes a launcher's link. ``newest``: asks for the checkpoint from
    which all go on, "" for none; None: it is still being looked for. Its argument is whether the
    program failed by itself. ``reached``: see Sizes.look(), its snapshot.
    """

    def __init__(
        self,
        own: Hello,
        limits: Limits,
        post: Callable[[int, Message], None],
        modified: Callable[[], int] = lambda: -1,
        drop: Callable[[int], None] = lambda seat: None,
        newest: Callable[..., str | None] = lambda **_: "",
        reached: Callable[[], int | None] = lambda: None,
    ) -> None:
        elastic = limits.elastic
        self.seats = Seats(own, rounds=limits.budget > 0, least=elastic.least if elastic else None)
        self.sizes = Sizes(elastic, own.replicas) if elastic else None
        self.history = History(round=0 if own.running else -1)
        self.outcome = Outcome(own.replicas, own.nproc)  # of the round that runs, or ended last
        #: How each replica was lost, by the newest round that lost some; for evidence.py.
        self.lost_in: dict[int, dict[int, str]] = {}
        self.limits, self.post, self.drop = limits, post, drop
        self.modified, self.newest, self.reached = modified, newest, reached
        self.phase: _Phase = _GangRuns(self) if own.running else _GangWaits(self)
        self.final: messages.End | messages.Finished | None = None  # the last word
        self._polled = 0.0

    @property
    def needed(self) -> bool:
        """Return whether another connected launcher, still running, needs the hub."""
        busy = self.seats.present.intersection(self.seats.serving) - self.outcome.done - {0}
        return self.final is None and bool(busy)

    def is_present(self, seat: int) -> bool:
        """Return whether a launcher is linked to the hub."""
        return seat in self.seats.present

    @property
    def runs(self) -> bool:
        """Return whether a round runs."""
        return isinstance(self.phase, _GangRuns)

    @property
    def waits(self) -> bool:
        """Return whether it waits for launchers that are missing."""
        return isinstance(self.phase, _GangWaits)

    @property
    def complete(self) -> bool:
        """Return whether a round has begun and every pod of the job is linked."""
        everybody = self.seats.own.replicas + self.seats.own.standby
        return self.history.round >= 0 and len(self.seats.present) == everybody

    @property
    def facts(self) -> dict[str, Any]:
        """Return what /state says of the gang: seats without a link, replica:seat that differ.

        From another thread, too.
        """
        seats = self.seats
        away = sorted(seats.members.keys() - seats.present) if self.final is None else []
        serving = ",".join(f"{r}:{seat}" for r, seat in enumerate(seats.serving) if r != seat)
        found = {"holds": seats.can_wait, "away": away[:STATE_MAX_AWAY], "serving": serving}
        if self.sizes is not None and self.final is None:
            parked = sorted(seats.present.difference(seats.serving))
            found |= {"size": len(seats.serving) if self.runs else 0, "parked": parked}
        return found

    @property
    def knows(self) -> set[int]:
        """Return whose launchers know sizes."""
        return {seat for seat, hello in self.seats.members.items() if hello.sizes}

    def fill(self, now: float) -> dict[int, int]:
        """Return who serves in the round that may begin now, {} while some are missing (H2, E2)."""
        seats = self.seats
        if self.sizes is not None:
            return dict(enumerate(self.sizes.ready(seats.stopped, self.knows, now)))
        filled = seats.fill()
        return filled if len(filled) == seats.own.replicas else {}

    @property
    def others(self) -> tuple[list[Exit], int]:
        """Return the ends with 0 at other launchers, and how many ranks run there."""
        outcome = self.outcome
        if not self.runs or outcome.replicas == 1:
            return [], 0
        done, serving = outcome.done - {0}, self.seats.serving
        ends = [one for one in outcome.exits.values() if serving[one.rank // outcome.nproc] in done]
        return ends, (outcome.replicas - 1 - len(done)) * outcome.nproc

    # --- Who comes and goes --------------------------------------------------------------

    def refuses(self, hello: Hello) -> messages.Refused | None:
        """Return why a launcher is not admitted, None if it can be (H1)."""
        return self.seats.refuses(hello, waiting=self.waits)

    def admit(self, hello: Hello, now: float) -> None:
        """Take in a launcher that is not refused: in the round that runs, or parked."""
        if self.is_present(hello.seat):  # of an older pod
            self.lost(hello.seat, now)
        before = self.seats.admit(hello)
        if self.sizes is not None:
            self.sizes.arrives(now)
        self.post(hello.seat, messages.Welcome(self.seats.own.birth, self.seats.own.pod))
        if self.final is not None:
            self.post(hello.seat, self.final)
        self.phase = self.phase.admitted(hello, before, now)
        if not hello.running:
            self.seats.stopped.add(hello.seat)
            self.tick(now)

    def lost(self, seat: int, now: float) -> None:
        """Go on without a launcher whose connection is gone, or end."""
        self.seats.present.discard(seat)
        self.seats.leaving.discard(seat)
        # Who has succeeded is not missed, but no round can follow without it.
        if self.final is None and not (self.runs and seat in self.outcome.done):
            self._vacate(seat, "was lost", now)

    def _vacate(self, seat: int, how: str, now: float, *, graceful: bool = False) -> None:
        """Have the place of a launcher filled, if it serves."""
        self.seats.stopped.discard(seat)
        if seat in self.seats.serving:
            stopping = isinstance(self.phase, _GangStops)
            self.phase = self.phase.vacated(seat, how, now, graceful=graceful)
            if stopping:  # perhaps for that one alone
                self.tick(now)

    def note_loss(self, seat: int, how: str, now: float) -> int:
        """Note that a replica has lost its launcher; return which."""
        replica = self.seats.serving.index(seat)
        self.outcome.lost.setdefault(replica, self.seats.members[seat].pod)
        if self.history.round not in self.lost_in:
            self.lost_in = {self.history.round: {}}
        self.lost_in[self.history.round].setdefault(replica, how)
        if self.outcome.wait_until is None:
            self.outcome.wait_until = now + self.limits.hold
        return replica

    def dismiss(self, now: float) -> bool:
        """End launchers with a failed GPU if the others can wait; return whether the hub's is one.

        A pod keeps its GPUs, so a round there would meet the failure again.
        """
        seats, outcome, dismissed = self.seats, self.outcome, set[int]()
        if not seats.can_wait or ExitCode.HARDWARE in self.limits.final:
            return False
        for exit_ in outcome.exits.values():
            replica = exit_.rank // outcome.nproc
            if exit_.code == ExitCode.HARDWARE and replica not in outcome.lost:
                seat = seats.serving[replica]
                seats.leaving.add(seat)
                seats.stopped.discard(seat)
                dismissed.add(seat)
                self.note_loss(seat, "had a GPU that failed", now)
                why = "a GPU failed here; the others wait for a new pod in this one's place"
                self.post(seat, messages.End(exit_.rank, why, graceful=False))
        return 0 in dismissed

    # --- What launchers say --------------------------------------------------------------

    def receive(self, seat: int, message: Message, now: float) -> None:
        """Handle an admitted launcher's message. Raise ValueError for what it must not say."""
        self._allow_for_pause(now)
        if self.final is not None:
            return
        if isinstance(message, messages.Leaving):
            self._leave(seat, now)
            return
        if not isinstance(message, OfRound):
            raise ValueError(f"a launcher must not say {type(message).__name__}")
        if message.round != self.history.round or seat not in self.seats.serving:
            return
        if isinstance(message, messages.Exiting | messages.Rescuing):
            self.phase.take(seat, message, now)
            return
        self.outcome.note(self.seats.serving.index(seat), message.exits, now)
        if isinstance(message, messages.Done):
            self.outcome.done.add(seat)
        if self.outcome.is_success():
            self.phase = self.end(messages.Finished())
        elif not isinstance(message, messages.Done):
            self.phase.take(seat, message, now)
            self.tick(now)

    def _leave(self, seat: int, now: float) -> None:
        """Let the others save together with a launcher that got a signal to end."""
        how = "got a signal to end"
        if seat not in self.outcome.done:
            self.seats.leaving.add(seat)
            self._vacate(seat, how, now, graceful=True)
        elif seat != 0 and self.runs:
            self.seats.present.discard(seat)  # it may go, but no round can follow without it
        else:
            why = f"the launcher of replica {self.seats.serving.index(seat)} {how}"
            self.phase = self.end_by(None, why, graceful=True)

    # --- What follows --------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Do the next due action; return when to call again at the latest."""
        self._allow_for_pause(now)
        self.phase = self.phase.tick(now)
        return self.phase.due

    def _allow_for_pause(self, now: float) -> None:
        """Move the barrier by the hub's own pause: messages sent meanwhile are unread."""
        pause = now - self._polled - _POLL_SECONDS
        if isinstance(self.phase, _GangStops) and pause > 0:
            self.phase.barrier_at += pause
        self._polled = now

    def end_by(
        self, cause: Exit | None, why: str, *, graceful: bool = False, code: int = 0
    ) -> _Phase:
        """End the attempt. ``cause``: the process that is blamed."""
        early = root_cause.ended_early(self.outcome.exits.values(), cause)
        rank = cause.rank if cause is not None else -1
        return self.end(messages.End(rank, why, graceful, early, code))

    def end(self, message: messages.End | messages.Finished) -> _Phase:
        """Post the last word; in the phase that follows nothing happens."""
        self.final = message
        self.post_all(message)
        return _Phase(self)

    def post_all(self, message: Message) -> None:
        """Post to all."""
        # The hub's own launcher last: the others' messages must be on their way when it ends.
        for seat in sorted(self.seats.present, reverse=True):
            self.post(seat, message)


class _Phase:
    """Reacts to what happens in the gang, and answers with the phase that follows.

    A pod's own phases are local_round.py's.
    ``due``: when to call tick() at the latest, None: it asks for no time.
    """

    def __init__(self, hub: Hub, due: float | None = None) -> None:
        self._hub, self.due = hub, due

    def tick(self, now: float) -> _Phase:
        return self

    def admitted(self, hello: Hello, before: str, now: float) -> _Phase:
        """React to a launcher that has come. ``before``: the pod that had its seat."""
        return self

    def vacated(self, seat: int, how: str, now: float, *, graceful: bool) -> _Phase:
        """Wait until the place of a launcher is filled (H2); end if the gang cannot wait."""
        hub, outcome = self._hub, self._hub.outcome
        replica = hub.note_loss(seat, how, now)
        if hub.seats.can_wait:
            return self
        cause = outcome.cause
        mine = cause is None or graceful or cause.rank // outcome.nproc == replica
        why = f"the launcher of replica {replica} {how}"
        end = partial(hub.end_by, None if mine else cause, why, graceful=graceful)
        return end() if graceful else self._end(end, now)

    def _end(self, end: Callable[[], _Phase], now: float) -> _Phase:
        """End the attempt without a launcher that the gang cannot wait for."""
        return end()

    def take(self, seat: int, message: OfRound, now: float) -> None:
        """Note what a launcher says beside the exits of its workers."""

    def _follow(self, now: float) -> _Phase:
        """Begin the next round, wait for missing launchers, or end."""
        hub, seats, outcome = self._hub, self._hub.seats, self._hub.outcome
        following = History()
        if hub.dismiss(now):
            return _Phase(hub)
        if hub.history.round >= 0:
            sizes, free = hub.sizes, False
            if sizes is not None:
                saved = outcome.snapshot_step > hub.history.snapshot_step
                ends, lost = outcome.exits.values(), outcome.lost
                free = sizes.ended(outcome.late or unreached(ends, lost, saved=saved), now)
            at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            grown = rounds.grown(hub.history, outcome, at=at) if sizes and sizes.asked else None
            loss, modified = outcome.loss(seats.idle_pods()), hub.modified()
            decision = rounds.decide(
                hub.history, outcome, hub.limits, at=at, modified=modified, loss=loss, free=free
            )
            if grown is None and decision.next is None:
                return hub.end_by(decision.cause, decision.why, code=decision.code)
            following = grown or decision.next or following
        filled = hub.fill(now)
        if not filled:
            return _GangWaits(hub)
        # One answer for all: ranks that went on from other checkpoints would train apart.
        last = following.records[-1] if following.records else Round()
        failed = last.get("kind") in ("exception", "exit")
        if (newest := hub.newest(failed=failed)) is None:
            return self  # asked again at the next tick
        # Who is left out of an elastic round may be in the next one (E4).
        seats.serve(filled, outcome.lost.values() if hub.sizes is None else ())
        hub.history = following
        hub.outcome = Outcome(len(filled), outcome.nproc)
        if hub.sizes is not None:
            hub.sizes.begins(seats.serving, now)
        for replica, seat in enumerate(seats.serving):
            go = messages.Go(seats.own.birth, following.round, replica, following.records, newest)
            hub.post(seat, replace(go, size=len(filled)) if seats.members[seat].sizes else go)
        return _GangRuns(hub)


class _GangRuns(_Phase):
    """All launchers that serve run the round, as far as is known."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._begun_at: float | None = None
        self._left: dict[int, int] = {}  # seat -> workers that still run, of those that said so

    def tick(self, now: float) -> _Phase:
        if self._begun_at is None:
            self._begun_at = now
        hub, outcome = self._hub, self._hub.outcome
        silent = outcome.replicas - len(self._left)
        running = sum(self._left.values()) + silent * outcome.nproc
        ends = tuple(outcome.exits.values())
        found = root_cause.cause_or_wait(ends, running, now, rounds=hub.limits.budget > 0)
        if found is None or isinstance(found, float):
            self.due = found
            return self if found is not None else self._resize(now)
        return self._stop(now)

    def _resize(self, now: float) -> _Phase:
        """End an elastic round in which nobody has failed for one with others, if it is time."""
        hub, seats, outcome = self._hub, self._hub.seats, self._hub.outcome
        if hub.sizes is None or outcome.done:
            return self
        here = seats.present - seats.leaving
        what = hub.sizes.look(here, hub.knows, hub.reached(), now)
        if what == "grow":
            hub.post(0, messages.Ask(hub.history.round))
        outcome.late = what == "late"
        return self._stop(now) if outcome.late else self

    def admitted(self, hello: Hello, before: str, now: float) -> _Phase:
        seats = self._hub.seats
        if hello.running or hello.seat not in seats.serving:
            return self
        if self._hub.sizes is not None and hello.seat in self._hub.outcome.done:  # E8
            return self
        # Its predecessor never came, or was done.
        self._hub.outcome.lost[seats.serving.index(hello.seat)] = before
        return self.vacated(hello.seat, "has been replaced", now, graceful=False)

    def vacated(self, seat: int, how: str, now: float, *, graceful: bool) -> _Phase:
        following = super().vacated(seat, how, now, graceful=graceful)
        return self._stop(now, graceful=graceful) if following is self else following

    def take(self, seat: int, message: OfRound, now: float) -> None:
        if isinstance(message, messages.Failed):
            self._left[seat] = message.running

    def _end(self, end: Callable[[], _Phase], now: float) -> _Phase:
        survivors = self._survivors()
        return _GangStops(self._hub, now, survivors, end) if survivors else end()

    def _stop(self, now: float, *, graceful: bool = False) -> _Phase:
        hub, outcome = self._hub, self._hub.outcome
        if not outcome.done <= hub.seats.present and hub.sizes is None:  # else away as any (E8)
            why = "a launcher whose workers had succeeded is gone"
            return hub.end_by(outcome.cause, why, graceful=graceful)
        if hub.dismiss(now):
            return _Phase(hub)
        outcome.lasted = 0.0 if self._begun_at is None else now - self._begun_at
        survivors = self._survivors(graceful=graceful)
        if not survivors:
            hub.post_all(messages.Stop(hub.history.round, graceful))
        return _GangStops(hub, now, survivors)

    def _survivors(self, *, graceful: bool = False) -> list[int]:
        """Return who may save the newest step: where it is trained on, and a process is alive."""
        hub, outcome, seats = self._hub, self._hub.outcome, self._hub.seats
        outcome.lost_first = outcome.loss(seats.idle_pods()) is not None
        if graceful or (hub.sizes is not None and hub.sizes.asked):  # they have saved
            return []
        lost = outcome.lost_first or not rounds.is_final(outcome, hub.limits)
        there = seats.present - seats.leaving - outcome.done if seats.own.rescues and lost else ()
        able = [seat for seat in seats.serving if seat in there and seats.members[seat].rescues]
        return [seat for seat in able if self._left.get(seat, 1)][:_MOST_ASKED]


class _GangStops(_Phase):
    """Stop was sent to all, first to the ``survivors`` that save a step; not all have stopped.

    ``end``: what follows then, None: another round, or what is decided on.
    """

    def __init__(
        self,
        hub: Hub,
        now: float,
        survivors: Collection[int],
        end: Callable[[], _Phase] | None = None,
    ) -> None:
        self.barrier_at = now + BARRIER_SECONDS
        super().__init__(hub, self.barrier_at)
        self._since, self._ended = now, end
        self._survivors = [*survivors]  # not yet asked
        self._writer = -1
        first = hub.outcome.exits.get(0)
        self._most = str(first.step) if first is not None else ""  # see Rescuer.begin()
        self._answer_by = 0.0  # until then the others run; 0: they were stopped
        if survivors:
            self._ask_to_write(now)

    def _ask_to_write(self, now: float) -> None:
        self._writer, self._answer_by = self._survivors.pop(0), now + RESCUE_SECONDS
        self.due = self._answer_by
        self._rescue(self._writer, "write" if self._survivors else "alone", self._most)

    def _ask_to_vouch(self) -> None:
        if self._survivors:
            self._rescue(self._survivors.pop(0), "vouch")
        else:
            self._rescue(self._writer, "word", "none")  # it need not wait for one

    def _rescue(self, seat: int, what: str, word: str = "") -> None:
        self._hub.post(seat, messages.Stop(self._hub.history.round, rescue=what, word=word))

    def _stop_rest(self, now: float) -> None:
        self._answer_by, self.barrier_at = 0.0, now + BARRIER_SECONDS
        self._hub.post_all(messages.Stop(self._hub.history.round))

    def _hear(self, seat: int, said: messages.Rescuing, now: float) -> None:
        """Take an answer; one that comes too late is passed over."""
        if said.answer == "done":
            rank, step = map(int, said.word.split())
            self._hub.outcome.saved = rank, step
        elif said.answer == "word":
            self._rescue(self._writer, "word", said.word)
        elif seat != self._writer or (
            not self._answer_by and (said.answer, said.word) == ("yes", "")
        ):
            # The others have got their Stop: nobody is left to vouch.
            self._rescue(self._writer, "word", "none")
        elif self._answer_by and said.answer == "next" and self._survivors:
            self._most = said.word or self._most
            self._ask_to_write(now)
        elif self._answer_by:
            if said.answer == "yes" and said.word != "own":
                self._ask_to_vouch()
            self._stop_rest(now)

    def tick(self, now: float) -> _Phase:
        """Wait until every launcher has stopped (H2)."""
        hub, seats = self._hub, self._hub.seats
        if self._answer_by:
            if self._writer in seats.present - seats.stopped and now < self._answer_by:
                self.due = self._answer_by
                return self
            self._stop_rest(now)
        there = seats.present - seats.leaving - seats.stopped
        missing = there if self._ended is not None else seats.running()
        self.due = self.barrier_at if missing and now < self.barrier_at else None
        if self.due is not None:
            return self
        if self._ended is not None:
            return self._ended()
        if missing and not (seats.can_wait and 0 not in missing):
            absent = missing - seats.members.keys()
            which = ", ".join(map(str, sorted(absent or missing)[:8]))
            what = "has not come to the hub" if absent else "did not stop"
            why = f"replica {which} {what} within {now - self._since:.0f} s"
            return hub.end_by(hub.outcome.cause, why)
        for seat in missing:
            hub.drop(seat)
            seats.present.discard(seat)
            hub.note_loss(seat, "did not stop its processes in time", now)
        return self._follow(now)

    def admitted(self, hello: Hello, before: str, now: float) -> _Phase:
        if hello.running:
            self._hub.post(hello.seat, messages.Stop(self._hub.history.round))
        return self

    def take(self, seat: int, message: OfRound, now: float) -> None:
        outcome, seats = self._hub.outcome, self._hub.seats
        if isinstance(message, messages.Exiting):
            self.barrier_at = now + BARRIER_SECONDS
        elif isinstance(message, messages.Rescuing):
            self._hear(seat, message, now)
        elif seat not in seats.leaving and isinstance(message, messages.Stopped):
            seats.stopped.add(seat)
            outcome.done.discard(seat)
            outcome.snapshot_step = max(outcome.snapshot_step, message.snapshot_step)


class _GangWaits(_Phase):
    """All that are here have stopped; others are missing."""

    def tick(self, now: float) -> _Phase:
        """Wait until every place is filled by a launcher that has stopped."""
        hub, outcome = self._hub, self._hub.outcome
        if outcome.wait_until is None:  # the first look of a hub that replaces one
            outcome.wait_until = now + hub.limits.hold
        self.due = outcome.wait_until
        if hub.fill(now):
            return self._follow(now)
        if hub.sizes is not None and hub.sizes.due is not None:  # enough are here (E3)
            self.due = hub.sizes.due
            return self
        if now < outcome.wait_until:
            return self
        filled = hub.seats.fill().keys() if hub.sizes is None else hub.seats.stopped
        missing = sorted(set(range(hub.seats.own.replicas)) - filled)
        which = ", ".join(map(str, missing[:8]))
        return hub.end_by(None, f"replica {which} was not replaced within {hub.limits.hold:.0f} s")

    def vacated(self, seat: int, how: str, now: float, *, graceful: bool) -> _Phase:
        self._hub.note_loss(seat, how, now)
        return self
