"""Draw the kills from a seed before the run begins: target, time, signal. Pure.

A kill comes at a random instant of a step, at a named fail point, or while the processes still come
back from the kill before it. Signals and victims are dealt like cards, so that a dozen kills
include every one of them, rank 0 and the launcher too.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import Signals
from typing import Final, TypeVar

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.failpoints import POINTS

#: Victim that is no rank.
LAUNCHER: Final = -1
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
#: Points that a process passes before its first step ends.
STARTING: Final = ("import", "rendezvous", "load", "warm-up")
_SIGNAL_DECK: Final = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
_MAX_HITS: Final = 12  # disk operations of about one snapshot

Card = TypeVar("Card")


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, ``delay`` of a step after ``step`` finished ones.

    ``victim``: a rank, or LAUNCHER. ``point``: where the victim signals itself, at the ``hits``-th
    time that it gets there; "" at a random instant instead. ``restarting``: while the gang comes
    back from the kill before; ``delay`` is then a share of that time. ``resumes``: a stopped
    process gets SIGCONT after a moment; otherwise the hang detection must find it. ``saved``: comes
    once the snapshot before it is durable, so that the restart continues from it.
    """

    number: int
    step: int
    delay: float
    victim: int
    signal: Signals
    point: str = ""
    hits: int = 1
    restarting: bool = False
    resumes: bool = False
    saved: bool = False

    @property
    def ends(self) -> bool:
        """Return whether a restart must follow; a snapshot's writer may be outside the gang."""
        return not self.resumes and not self.anybody

    @property
    def anybody(self) -> bool:
        """Return whether the point chooses the victim: not every rank writes snapshots."""
        return self.point == "snapshot"

    def __str__(self) -> str:
        who = "the launcher" if self.victim == LAUNCHER else f"rank {self.victim}"
        who = "the writer" if self.anybody else who
        where = f" at {self.point}" if self.point else ""
        when = "while restarting" if self.restarting else f"step {self.step}"
        return f"{when:<17} {self.signal.name} {who}{where}"


def plan_kills(
    *,
    seed: int,
    count: int,
    nproc: int,
    total_steps: int,
    epoch: int,
    every: int,
    signals: Sequence[Signals] = SIGNALS,
    points: Sequence[str] = POINTS,
) -> list[Kill]:
    """Draw ``count`` kills in the order of their steps. Raises ConfigError.

    One comes late, to show what changes only during a run. ``epoch``: steps in one, 0 if unknown;
    ``every``: steps from a snapshot to the next.
    """
    if count < 1:
        raise ConfigError(f"--kills {count} must be at least 1")
    if count > total_steps - 1:
        raise ConfigError(
            f"--kills {count} needs a run of at least {count + 1} steps, the script makes"
            f" {total_steps}: lower --kills, or have the script train longer"
        )
    draw = random.Random(f"{seed}/{count}/{nproc}/{total_steps}")
    late = draw.choice(_late_steps(total_steps, epoch, every))
    others = [step for step in range(1, total_steps) if step != late]
    steps = sorted([late, *draw.sample(others, count - 1)])
    dealt = _deal(draw, [s for s in _SIGNAL_DECK if s in signals] or list(signals), count)
    victims = _deal(draw, [LAUNCHER, *range(nproc)], count)
    places = _deal(draw, [*points, *[""] * (len(points) + 4)], count)
    if victims[at := steps.index(late)] == LAUNCHER:
        victims[at] = draw.randrange(nproc)
    kills = [
        Kill(0, step, draw.random(), victim, signum, saved=True)
        if step == late
        else _kill(draw, step, signum, victim, place)
        for step, signum, victim, place in zip(steps, dealt, victims, places, strict=True)
    ]
    kills = _barrier_last(kills, total_steps)
    planned: list[Kill] = []
    for number, kill in enumerate(kills, 1):
        before = planned[-1] if planned else None
        planned.append(replace(_in_its_turn(draw, kill, before), number=number))
    return planned


def _late_steps(total_steps: int, epoch: int, every: int) -> range:
    """Return the last quarter, with a snapshot of the second epoch or a later one.

    Without the last three steps, which a gang may still make after SIGTERM.
    """
    first = 3 * total_steps // 4 + 1
    if epoch < total_steps:
        first = max(first, epoch + every)
    first = min(first, total_steps - 1)
    return range(first, max(first + 1, total_steps - 3))


def _deal(draw: random.Random, deck: Sequence[Card], count: int) -> list[Card]:
    """Deal cards from shuffled decks, one after the other."""
    cards: list[Card] = []
    while len(cards) < count:
        cards += draw.sample(deck, len(deck))
    return cards[:count]


def _kill(draw: random.Random, step: int, signum: Signals, victim: int, point: str) -> Kill:
    if victim == LAUNCHER:
        point = ""  # the points are in the training processes
    return Kill(
        number=0,
        step=step,
        delay=draw.random(),
        victim=victim,
        signal=signum,
        point=point,
        hits=draw.randint(1, _MAX_HITS) if point == "snapshot" else 1,
        # No process on this machine watches the launcher.
        resumes=signum == signal.SIGSTOP and (victim == LAUNCHER or draw.random() < 0.5),
    )


def _barrier_last(kills: list[Kill], total_steps: int) -> list[Kill]:
    """Move kills at the barrier to the run's end, and let them kill, not pause.

    A victim that only pauses there is not killed again.
    """
    others = [kill for kill in kills if kill.point != "barrier"]
    last = [
        replace(kill, step=total_steps, resumes=False) for kill in kills if kill.point == "barrier"
    ]
    return others + last


def _in_its_turn(draw: random.Random, kill: Kill, before: Kill | None) -> Kill:
    """Make a kill at a starting point follow one that ends the gang."""
    wanted = kill.point in STARTING or (not kill.point and draw.random() < 0.25)
    if not wanted or kill.saved:
        return kill
    if before is None or not before.ends:
        return replace(kill, point="")
    # Startup may take minutes, so no deadline would find a stopped process.
    resumes = kill.signal == signal.SIGSTOP
    return replace(kill, restarting=True, step=before.step, resumes=resumes)
