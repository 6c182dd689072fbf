"""Have a worker of this launcher save the newest step before all are ended.

local_round.py calls begin() at a Stop with ``rescue``. The workers' marks say who holds the newest
step whole, and whether saving it takes less time than doing its steps again. A worker listens on a
socket (training/rescue.py), whose lines the supervisor's loop reads. Whatever fails leaves
the older snapshot: the workers are killed by the deadline.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from ddpjob_trainer import trace
from ddpjob_trainer.launcher.hub.messages import Message, Rescuing
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness.marks import read_marks, socket_path

#: Of the time that the repeated steps would take, and at most: a rescue lasts no longer.
_SHARE, MOST_SECONDS = 0.5, 30.0
#: Where nothing was written in this round yet.
_FIRST_WRITE_SECONDS = 0.1
#: A process that dies accepts as well: one that lives says its first word in this time.
_FIRST_WORD_SECONDS = 0.3
#: For chaos: what a rescue came to here, beside what a worker says itself.
_CAUSES = {"no": "it does not pay", "next": "no process can, in time", "done": "saved"}


class Rescuer:
    """The rescue of one round at one launcher. ``send``: to the hub, with the time."""

    def __init__(
        self,
        workers: WorkerGroup,
        selector: selectors.BaseSelector,
        send: Callable[[Message, float], object],
        say: Callable[[str], None],
    ) -> None:
        self._workers, self._selector, self._send, self._say = workers, selector, send, say
        self._links: dict[int, socket.socket] = {}  # by rank
        self._lines: dict[int, bytes] = {}
        self._writer = -1
        self._until = 0.0
        self._alone = False  # a second worker of this launcher vouches
        self._most = ""

    def begin(self, what: str, now: float, most: str = "") -> bool:
        """Ask workers to write or to vouch; return whether one is asked, else all may be ended.

        ``most``: the newest step whose body rank 0 has ended, "" where rank 0 is here, or lost.
        """
        # What rank 0 does after commit() it does alone, and would do again if the step was.
        first = read_marks(self._workers.state_dir, 0).step
        self._most = str(first) if first >= 0 else most
        found = {rank: read_marks(self._workers.state_dir, rank) for rank in self._workers.pids}
        able = [rank for rank in found if found[rank].whole]
        able.sort(key=lambda rank: (rank == 0, found[rank].step, found[rank].intact))
        if not able:
            return self._answer("next", now, self._most)
        *others, best = able
        step, intact = found[best].step, found[best].intact
        others = [rank for rank in others if found[rank].step == step or not intact]
        single = what == "alone" and not others
        self._alone = single or (what != "vouch" and bool(others))
        seconds = min(_SHARE * found[best].saved, MOST_SECONDS)
        worth = seconds > (found[best].write_seconds or _FIRST_WRITE_SECONDS)
        if not worth or (single and not found[best].vouched):
            return self._answer("no", now)
        self._until = now + seconds
        self._writer = -1 if what == "vouch" else best
        try:
            self._ask(best, "alone" if single else "vouch" if what == "vouch" else "write", seconds)
            if self._alone and not single:
                self._ask(others[-1], "vouch", seconds)
        except OSError:
            self._close()
            return self._answer("next", now, self._most)
        first_word_by = now + _FIRST_WORD_SECONDS
        self._workers.end_all_but(self._links, now, self._until, first_word_by=first_word_by)
        return True

    def agree(self, word: str) -> None:
        """Pass on to who writes what another survivor holds."""
        if self._writer in self._links:
            with contextlib.suppress(OSError):  # it is gone: its end is read
                self._links[self._writer].sendall(json.dumps({"word": word}).encode() + b"\n")

    def _answer(self, answer: str, now: float, word: str = "") -> bool:
        if answer in _CAUSES:
            trace.mark("rescue", came_to=_CAUSES[answer])
        self._send(Rescuing(self._workers.round, answer, word), now)
        return False

    def _ask(self, rank: int, what: str, seconds: float) -> None:
        """Connect to a worker and say what it is to do. Raises OSError."""
        link = self._links[rank] = socket.socket(socket.AF_UNIX)
        self._lines[rank] = b""
        self._selector.register(link, selectors.EVENT_READ, partial(self._read, rank))
        link.setblocking(False)
        link.connect(str(socket_path(self._workers.state_dir, rank)))
        most = int(self._most) if self._most and rank else None
        order = {"do": what, "seconds": seconds, "most": most}
        link.sendall(json.dumps(order).encode() + b"\n")

    def _read(self, rank: int, now: float) -> None:
        if rank not in self._links:  # closed for the other one, in the same select()
            return
        part = b""
        with contextlib.suppress(OSError):
            part = self._links[rank].recv(4096)
        *lines, self._lines[rank] = (self._lines[rank] + part).split(b"\n")
        over = not part
        for line in lines:
            try:
                over |= self._take(rank, json.loads(line), now)
            except (ValueError, TypeError, KeyError):  # a program may write to the socket, too
                over = True
        if over and (rank == self._writer or self._writer < 0):
            if not part:  # it died: who waits for it need not
                self._answer("next", now, self._most)
            self._close()
            self._workers.kill_by(now)
        elif not part:
            self._close(rank)
            self.agree("none")  # the writer reads the first word only

    def _take(self, rank: int, line: dict[str, Any], now: float) -> bool:
        """Do as a worker's line asks for; return whether it has no more to do."""
        writes = rank == self._writer
        if "step" in line:
            self._workers.first_word_by = None
            if writes:
                self._answer("yes", now, "own" if self._alone else "")
            return False
        if "word" in line and self._writer < 0:
            self._answer("word", now, line["word"])
        elif "word" in line:
            self.agree(line["word"])
        elif "done" in line:
            self._answer("done", now, f"{rank} {line['done']}")
            self._say(f"rank {rank} has saved step {line['done']}: no step is done again")
        else:
            trace.mark("rescue", came_to=line["no"])
            self._say(f"rank {rank} saves no step: {line['no']}")
            if writes or self._writer < 0:
                self._answer("next", now, self._most)
            self.agree("none")
        return True

    def _close(self, *ranks: int) -> None:
        for rank in ranks or [*self._links]:
            link = self._links.pop(rank)
            self._selector.unregister(link)
            link.close()
