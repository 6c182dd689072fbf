"""Keep warm spares, one per worker, that start a round's processes in milliseconds.

starter.py calls it. A fork server (fork_server.py) imports torch once and forks them. When a spare
fails, a fresh interpreter takes its place: rounds never depend on spares.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from subprocess import DEVNULL

from ddpjob_trainer import trace
from ddpjob_trainer.launcher.processes import children, fork_server
from ddpjob_trainer.launcher.processes.fork_server import Program

#: How long a called spare may take to answer.
_ANSWER_SECONDS = 10.0
#: How long the first round's workers wait for the fork server's imports.
_IMPORT_SECONDS = 120.0
#: So often in a row a spare, or the fork server, may die while it imports.
_MAX_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Call:
    """A worker's start: environment changes, stdout, stderr, and descriptors by variable.

    ``arguments``: more than the program's own.
    """

    env: Mapping[str, str]
    out: int
    err: int
    fds: Mapping[str, int]
    arguments: Sequence[str] = ()

    def close(self) -> None:
        """Close stdout and stderr here."""
        os.close(self.out)
        os.close(self.err)


@dataclass(slots=True)
class _Spare:
    line: socket.socket
    pid: int = 0  # 0: not known yet
    ready: bool = False
    call: Call | None = None  # kept until the spare is forked
    called_at: float | None = None


class Spares:
    """``count`` 0: no spares, and every call is refused.

    ``preload``: modules that the fork server imports for all of them.
    """

    def __init__(
        self,
        program: Program,
        count: int,
        env: Mapping[str, str],
        preload: Sequence[str],
        selector: selectors.BaseSelector,
        tell: Callable[[str], None],
    ) -> None:
        self._program, self._preload, self._env = program, preload, env
        self._selector, self._tell = selector, tell
        self._count = count
        self._server: socket.socket | None = None
        self._server_pid = 0
        self._compiler = False  # torch's, in the spares to come
        self._warm = False
        self._deaths = 0
        self._spares: dict[int, _Spare] = {}  # by local rank
        self._arrivals: list[tuple[int, int | Call]] = []
        if preload and not count:
            tell("warning: no warm spares, so each process imports --preload's modules itself")

    def pids(self) -> set[int]:
        """Return the pids of the fork server and of uncalled spares."""
        waiting = (one.pid for one in self._spares.values() if one.called_at is None)
        return {self._server_pid, *waiting}

    def start(self) -> None:
        """Start the fork server, unless it runs."""
        if self._count and self._server is None:
            try:
                self._start_server()
            except OSError as error:
                self._off(f"cannot start the fork server: {error.strerror}")

    def refill(self, env: Callable[[int], Mapping[str, str]], *, compiler: bool = False) -> None:
        """Start the fork server, or ask it for the missing spares, with torch's compiler or not."""
        self._compiler |= compiler
        self.start()
        if self._warm:
            for local_rank in range(self._count):
                if self._server is not None and local_rank not in self._spares:
                    self._fork(local_rank, env(local_rank), called=False)

    @property
    def full(self) -> bool:
        """Return whether all spares exist."""
        return len(self._spares) >= self._count

    def call(self, local_rank: int, call: Call, now: float) -> int | None:
        """Turn a spare into a worker and return its pid; None: arrivals() will have it.

        A fork server that still imports handles the call afterwards. Raises LookupError when there
        is no spare and none can be forked.
        """
        if local_rank not in self._spares and (
            self._server is None or not self._fork(local_rank, call.env, called=True)
        ):
            raise LookupError(local_rank)
        one = self._spares[local_rank]
        if one.pid and not self._send(one, call):
            self._drop(local_rank)
            raise LookupError(local_rank)
        one.called_at = now
        if one.pid:
            return one.pid
        one.call = replace(call, out=os.dup(call.out), err=os.dup(call.err))
        return None

    def forget(self) -> None:
        """Let the spares that wait end, since their environment is another rank's."""
        for local_rank, one in list(self._spares.items()):
            if one.called_at is None:
                self._drop(local_rank)

    def arrivals(self) -> list[tuple[int, int | Call]]:
        """Take who has come of those that call() promised: (local rank, pid).

        Where a spare has failed the call comes back, to be answered otherwise and closed.
        """
        came, self._arrivals = self._arrivals, []
        return came

    def recall(self, awaited: Collection[int] = ()) -> None:
        """Cancel the calls that no spare has received, other than of ``awaited`` local ranks."""
        for local_rank, one in self._spares.items():
            if one.call is not None and local_rank not in awaited:
                one.call.close()
                one.call = one.called_at = None

    def ended(self, pid: int) -> None:
        """Handle a reaped child of the launcher; it may be one of these."""
        for local_rank, one in list(self._spares.items()):
            if one.pid == pid:
                self._lost(local_rank)
        if pid == self._server_pid:
            self._server_pid = 0
            if self._warm:  # else its last message is still unread
                self._forget_server()

    def tick(self, now: float) -> float | None:
        """Give up on spares that do not answer."""
        dues = []
        for local_rank, one in list(self._spares.items()):
            if one.called_at is None or (one.pid and not one.ready):
                continue
            imports = not self._warm and not one.pid
            due = one.called_at + (_IMPORT_SECONDS if imports else _ANSWER_SECONDS)
            if now < due:
                dues.append(due)
            elif one.pid:
                children.send(one.pid, signal.SIGKILL)  # stopped, it seems: a worker that failed
            else:
                self._kill_server()
                self._lost(local_rank)
        return min(dues, default=None)

    # --- The fork server -----------------------------------------------------------------

    def _start_server(self) -> None:
        given = json.dumps(asdict(self._program) | {"preload": self._preload})
        mine, theirs = fork_server.pair()
        there = theirs.fileno()
        command = (sys.executable, "-u", "-m", fork_server.__name__, str(there), given)
        try:
            self._server_pid = children.spawn(command, self._env, DEVNULL, DEVNULL, (there,))
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        # It reads nothing while it imports, and the launcher must not wait for it.
        mine.setblocking(False)
        self._server = mine
        self._selector.register(mine, selectors.EVENT_READ, self._server_spoke)

    def _server_spoke(self, now: float) -> None:
        if self._server is None:  # forgotten since select() returned
            return
        received = fork_server.receive(self._server)
        if received is None:
            self._forget_server()
        elif unfit := received[0].get("unfit"):
            self._off(unfit)
        else:
            self._warm = True
            self._deaths = 0
            if warnings := received[0]["warnings"]:
                self._tell(f"warning: each process imports --preload's modules itself: {warnings}")
            for one in self._spares.values():  # their forks begin now
                one.called_at = None if one.called_at is None else now

    def _off(self, why: str) -> None:
        """Turn spares off: rounds start fresh interpreters from now on."""
        if self._count:  # else another spare has said the same
            self._tell(f"no warm spares: {why}")
            self._count = 0
            self._kill_server()

    def _died(self, who: str) -> None:
        """Count a death, and give up after several: each try takes time from training."""
        self._deaths += 1
        if self._deaths == _MAX_DEATHS:
            self._off(f"{who} died {self._deaths} times in a row")

    def _kill_server(self) -> None:
        if self._server_pid:
            children.send(self._server_pid, signal.SIGKILL)
        self._forget_server()

    def _forget_server(self) -> None:
        warm, self._warm = self._warm, False
        if self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None
            if not warm:
                self._died("the fork server")

    # --- Spares --------------------------------------------------------------------------

    def _fork(self, local_rank: int, env: Mapping[str, str], *, called: bool) -> bool:
        assert self._server is not None
        try:
            mine, theirs = fork_server.pair()
        except OSError:  # no descriptors left: a round does not need it
            return False
        try:
            # One that is called at once must not wait for imports.
            compiler = self._compiler and not called
            body = {"env": dict(env), "called": called, "compiler": compiler}
            fork_server.send(self._server, body, [theirs.fileno()])
        except BlockingIOError:  # too many requests: this one is dropped
            mine.close()
            return False
        except OSError:
            mine.close()
            self._forget_server()
            return False
        finally:
            theirs.close()
        self._spares[local_rank] = _Spare(mine)
        self._selector.register(
            mine, selectors.EVENT_READ, lambda now: self._spare_spoke(local_rank, mine, now)
        )
        return True

    def _spare_spoke(self, local_rank: int, line: socket.socket, now: float) -> None:
        one = self._spares.get(local_rank)
        if one is None or one.line is not line:
            return
        received = fork_server.receive(line)
        if received is None:
            self._lost(local_rank)  # or it has received the call, and closed this line
            return
        body = received[0]
        if "pid" in body:
            one.pid = body["pid"]
            if one.call is not None:
                self._deliver(local_rank, one, one.call)
        elif "unfit" in body and one.called_at is None:  # else it is a worker by now
            self._drop(local_rank)
            self._off(body["unfit"])
        else:
            one.ready = True
            self._deaths = 0
            spares = [other for other in self._spares.values() if other.called_at is None]
            if len(spares) >= self._count > 0 and all(other.ready for other in spares):
                trace.mark("spares")
        if one.ready and one.called_at is not None:
            one.called_at = now

    def _deliver(self, local_rank: int, one: _Spare, call: Call) -> None:
        one.call = None
        if self._send(one, call):
            call.close()
            self._arrivals.append((local_rank, one.pid))
        else:
            self._drop(local_rank)
            self._arrivals.append((local_rank, call))

    def _send(self, one: _Spare, call: Call) -> bool:
        body = {"env": dict(call.env), "fds": [*call.fds], "arguments": [*call.arguments]}
        try:
            fork_server.send(one.line, body, [call.out, call.err, *call.fds.values()])
        except OSError:
            return False
        return True

    def _lost(self, local_rank: int) -> None:
        one = self._spares[local_rank]
        self._drop(local_rank)
        if one.call is not None:
            self._arrivals.append((local_rank, one.call))
        # One whose pid is not known yet is killed with the round's other leftovers.
        elif one.pid and not one.ready and one.called_at is None:
            self._died("a spare")

    def _drop(self, local_rank: int) -> None:
        one = self._spares.pop(local_rank)
        self._selector.unregister(one.line)
        one.line.close()
