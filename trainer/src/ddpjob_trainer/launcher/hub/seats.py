"""Hold who may come, who is here and who serves which replica: pure, asked by the hub.

A launcher has its pod's seat for life; the replica that it serves is said with each Go. H1 to H3
are rules of the protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ddpjob_trainer.launcher.hub.messages import Hello, Refused, is_of_the_job


class Seats:
    """``own``: the Hello of the hub's own launcher, to which all others must fit; its birth is the
    hub's number. ``rounds``: a round may follow another. ``least``: so many can be a gang.
    """

    def __init__(self, own: Hello, *, rounds: bool, least: int | None = None) -> None:
        self.own = own
        #: Each replica's seat in this round; empty before the first of a hub that replaces one.
        self.serving: tuple[int, ...] = tuple(range(own.replicas)) if own.running else ()
        self.present: set[int] = set()  # admitted and not lost
        self.leaving: set[int] = set()  # present, but about to end
        self.stopped: set[int] = set()  # present, and nothing of the gang runs there
        self.can_wait = False  # all have come, and each can wait for the replacement of a lost one
        self._rounds = rounds
        self._least = own.replicas if least is None else least
        self.members: dict[int, Hello] = {}  # the newest ever admitted
        self._out: set[str] = set()  # pods that others have replaced

    # --- Admission ---------------------------------------------------------------------------

    def refuses(self, hello: Hello, *, waiting: bool) -> Refused | None:
        """Return why a launcher is not admitted, None if it can be (H1).

        ``waiting``: the gang waits for launchers now.
        """
        mine, seat = self.own, hello.seat
        if hello.uid != mine.uid:
            return Refused("this hub belongs to another job", final=False)
        if not is_of_the_job(hello, mine.token):
            return Refused("this launcher does not know the secret of the hub's job", final=False)
        # With a hub that replaces one, older launchers are welcome once they have stopped.
        older = hello.birth < mine.birth and (mine.running or hello.running)
        if older or (hello.birth > mine.birth and hello.running):
            final = older and (mine.running or not hello.holds)
            return Refused(f"this hub belongs to attempt {mine.birth}", final)
        if mine.sizes and hello.running:  # by Go alone a round of this gang begins (E9)
            return Refused("it runs a round that this hub has not begun: which image has it?", True)
        if _sizes(hello) != _sizes(mine):
            return Refused(
                f"size mismatch: hub has {_sizes(mine)}, launcher {_sizes(hello)}", final=True
            )
        seats = mine.replicas + (0 if hello.running else mine.standby)
        if not 0 <= seat < seats:
            return Refused(f"replica {seat} is not one of {seats}", final=True)
        known = self.members.get(seat)
        if known is None:
            return None
        if hello.pod in self._out or hello.birth < known.birth:  # H3
            return Refused("this pod has been replaced by another one", final=True)
        back = hello.pod == known.pod and not hello.running and seat not in self.present
        if seat > 0 and (hello.birth > known.birth or (back and (waiting or self.can_wait))):
            return None
        return Refused(f"replica {seat} has been admitted before", final=False)

    def admit(self, hello: Hello) -> str:
        """Give a launcher its seat; return the pod that had it before, "" for none."""
        known = self.members.get(hello.seat)
        before = known.pod if known is not None else ""
        if known is not None and before != hello.pod:
            self._out.add(before)
        self.members[hello.seat] = hello
        self.present.add(hello.seat)
        self.can_wait = (
            self._rounds
            and len(self.members) >= self._least
            and self.members.keys() >= set(self.serving)
            and all(one.holds for one in self.members.values())
        )
        return before

    # --- Who serves --------------------------------------------------------------------------

    def running(self) -> set[int]:
        """Return who must stop before the next round begins (H2)."""
        everybody = self.present - self.leaving if self.can_wait else set(self.serving)
        return everybody - self.stopped

    def fill(self) -> dict[int, int]:
        """Choose who serves next: a seat for each replica, of those where nothing runs (H2).

        Replica 0 is the hub's own. Who serves one goes on with it; then comes who held it last,
        then a new pod of its seat, then the lowest standby. The place of one that leaves is free
        when it has left, for till then its workers may run.
        """
        serving = {seat: replica for replica, seat in enumerate(self.serving)}
        held = {seat: self.members[seat].held for seat in self.stopped}
        own = {seat: seat for seat in self.stopped}
        filled = {0: 0} if 0 in self.stopped else {}
        idle = self.stopped - {0}
        busy = {replica for seat, replica in serving.items() if seat in self.leaving}
        free = set(range(1, self.own.replicas)) - busy
        for wish in (serving, held, own):
            for seat in sorted(idle & wish.keys()):
                if wish[seat] in free:
                    free.remove(wish[seat])
                    idle.remove(seat)
                    filled[wish[seat]] = seat
        return filled | dict(zip(sorted(free), sorted(idle), strict=False))

    def serve(self, filled: Mapping[int, int], lost: Collection[str]) -> None:
        """Have these serve in the round that begins. ``lost``: pods that have lost their place."""
        self._out.update(set(lost) - self.idle_pods())
        self.serving = tuple(filled[replica] for replica in range(len(filled)))
        self.stopped.difference_update(self.serving)

    def idle_pods(self) -> set[str]:
        """Return the pods of the launchers that are linked and where nothing runs."""
        return {self.members[seat].pod for seat in self.stopped}


def _sizes(hello: Hello) -> str:
    """Word what must be the same at all launchers."""
    standby = f" and {hello.standby} standby" if hello.standby else ""
    return f"{hello.replicas}x{hello.nproc} processes{standby}"
