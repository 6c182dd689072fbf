"""End a training process early: on SIGTERM, an exception, a lost peer.

A signal handler only sets a flag while the loop runs; the ranks agree on a step at which all of
them stop. Outside the loop there is nothing to save, and the process ends at once; so it does when
the loop is over before they could agree, but for a moment in which finish() may come first.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

from ddpjob_contract import ExitCode
from ddpjob_trainer.comm.peer_loss import brief, cure_of, is_peer_loss, leave
from ddpjob_trainer.comm.sealed import Board
from ddpjob_trainer.comm.world import World, other_call
from ddpjob_trainer.environment import TRACEBACK, state_directory, wants_traceback
from ddpjob_trainer.errors import ConfigError, DivergedError, HardwareError, PeerLostError
from ddpjob_trainer.gpu import devices
from ddpjob_trainer.liveness.heartbeat import RankStateWriter
from ddpjob_trainer.printing import say

# --- Refusals: one line with the cure -------------------------------------------------------------
# All ranks of a launcher meet the same error, so the first one prints it. A traceback through our
# code helps nobody who has mistyped an option; DDPJOB_TRAINER_TRACEBACK=1 brings it back.

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
#: What calls our hooks, and enters our context managers.
_BETWEEN = ("<", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
#: A child process says so, and its rank, which then meets something else, ends by it.
UNGUARDED = (
    "a child process that was started by spawn or forkserver, as of a DataLoader, reads the script"
    " from its first line and is at ddp.start() again: put what trains below `if __name__ =="
    ' "__main__":`'
)


def print_refusal(rank: int, error: BaseException, trace: TracebackType | None) -> bool:
    """Say such an error in one line; False: nothing was said, the traceback is wanted."""
    if not isinstance(error, ConfigError | HardwareError) or wants_traceback(os.environ):
        return False
    text = _worded(error)
    if _is_first(text):
        say(rank, f"{text}{_place(trace)} ({TRACEBACK}=1 shows the traceback)")
    return True


def _is_first(text: str) -> bool:
    """Tell whether no other rank of this launcher has said it in this round."""
    path = _mark_of(text)
    if path is None:
        return True
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # said twice is better than not at all
    return True


def refusal_of_child() -> ConfigError | None:
    """Return what a child process of this launcher's ranks was refused for in this round."""
    error = ConfigError(UNGUARDED)
    path = _mark_of(_worded(error))
    return error if path is not None and path.exists() else None


def _worded(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _mark_of(text: str) -> Path | None:
    """Return the file that marks this as said; None without a launcher of ours."""
    directory = state_directory(os.environ)
    name = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return None if directory is None else directory / f"refusal-{name}"


def _place(trace: TracebackType | None) -> str:
    """Find the line of the script from which our code was called, perhaps through torch."""
    found = ""
    for frame in traceback.extract_tb(trace):
        if frame.filename.startswith(_OURS):
            if found:
                break
        elif not frame.filename.startswith(_BETWEEN):
            found = f" [{frame.filename}, line {frame.lineno}]"
    return found


# --- Shutdown -------------------------------------------------------------------------------------

#: Between the end of the loop and that of a process that was asked to stop in its last step.
_MOMENT_SECONDS = 1.0
_CALLS = 8  # a call may be over on one rank before another that differs waits for it


class _Listening:
    """Ends the process for a lost peer. A step enters it often: a generator would take longer."""

    def __init__(self, shutdown: Shutdown) -> None:
        self._shutdown = shutdown

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            self._shutdown.if_peer_lost(error)


class Shutdown:
    """Owns SIGTERM, SIGINT and sys.excepthook of a training process.

    ``reached``: how often peers() was entered, on every rank alike. ``calls``: for what, lately.
    ``listening``: the same as peers(), where one rank alone may act.
    """

    def __init__(self, rank: int, state: RankStateWriter) -> None:
        self._rank = rank
        self._state = state
        self._in_loop = False
        self.signal = 0  # the one that asked us to stop, 0: none
        self.failing = False  # an exception ends this process
        self.before_leaving: Callable[[], None] = lambda: None  # where a peer is lost
        self.reached = 0
        self.listening = _Listening(self)
        self.calls: deque[tuple[int, str]] = deque(maxlen=_CALLS)
        self._hook = sys.excepthook
        self.watch_exceptions()
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._replace(signum)
            self._mask = threading.local()
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork,
                after_in_child=self._in_child,
            )

    def _replace(self, signum: signal.Signals) -> None:
        before: Any = signal.signal(signum, self._received)
        ours = isinstance(getattr(before, "__self__", None), Shutdown)  # of a run before
        if callable(before) and before is not signal.default_int_handler and not ours:
            say(
                self._rank,
                f"warning: the script's handler of {signum.name} is replaced: the ranks end"
                " together after a step, with a snapshot. One that is set after ddp.start()"
                f" stays, and must call the one before, signal.getsignal(signal.{signum.name})",
            )

    def _before_fork(self) -> None:
        # A signal that reached the child before it has its own handlers would be forgotten.
        self._mask.old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.old)

    def _in_child(self) -> None:
        """Let a child, of multiprocessing say, end on a signal. It has no step to finish."""
        for signum, default in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            if signal.getsignal(signum) == self._received:
                signal.signal(signum, default)
        self._after_fork()

    def watch_exceptions(self) -> None:
        """Take sys.excepthook, again after torch has put its own around ours.

        init_process_group does: its hook keeps the text back until ours returns, which never does.
        """
        sys.excepthook = self._uncaught

    def _received(self, signum: int, frame: FrameType | None) -> None:
        if not self._in_loop or self.signal == signum == signal.SIGINT:
            leave(128 + signum)
        self.signal = self.signal or signum

    def peers(self, what: str) -> _Listening:
        """Wait for the others in this block. ``what``: the call, as a script's author knows it."""
        self.reached += 1
        self.calls.append((self.reached, what))
        return self.listening

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """Defer signals within the training loop to the step on which all ranks agree."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False
            if self.signal:
                self._remind_later()

    def _remind_later(self) -> None:
        """End a moment after the loop: by then all may be done, or an error tells more."""

        def remind() -> None:
            if not self.failing:
                os.kill(os.getpid(), self.signal)

        timer = threading.Timer(_MOMENT_SECONDS, remind)
        timer.daemon = True
        timer.start()

    def stop(self, step: int) -> NoReturn:
        """End after an agreed stop. A rank that got no signal itself is collateral: 75."""
        if not self.signal:
            self._state.failed(PeerLostError("another rank got a signal to stop"))
            say(self._rank, f"stopped after step {step}: another rank got a signal to stop")
            leave(ExitCode.PEER_LOST)
        say(self._rank, f"stopped after step {step} by {signal.Signals(self.signal).name}")
        leave(128 + self.signal)

    def drill(self, step: int) -> NoReturn:
        """End with all ranks after this step; the launcher then starts the next round."""
        self._state.ends("drill")
        if self._rank == 0:
            say(0, f"a drill: all processes end after step {step} and do its last steps again")
        leave(ExitCode.PEER_LOST)

    def if_peer_lost(self, error: BaseException, *, explain: bool = False) -> None:
        """End with exit code 75 if the error says that another rank is gone.

        ``explain``: print the traceback too, unless the error is our own.
        """
        if not is_peer_loss(error):
            return
        if explain and not isinstance(error, PeerLostError):
            self._hook(type(error), error, error.__traceback__)
        lost = error if isinstance(error, PeerLostError) else PeerLostError(brief(error))
        self._state.failed(lost)
        say(
            self._rank,
            f"lost a peer after step {self._state.state.step}, ending with exit code"
            f" {ExitCode.PEER_LOST:d}: {lost}",
        )
        if not self.signal:
            self.before_leaving()
        leave(ExitCode.PEER_LOST)

    def refuse(self, error: ConfigError | PeerLostError) -> NoReturn:
        """End at once, from any thread. The main one waits for peers that will not come."""
        self._state.failed(error)
        if not print_refusal(self._rank, error, None):
            say(self._rank, f"{type(error).__name__}: {error}")
        leave(exit_code_of(error))

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report, run exit handlers, and end without waiting for peers."""
        error = refusal_of_child() or error
        self.if_peer_lost(error, explain=True)
        self._state.failed(error)
        state = self._state.state
        if state.phase == "done" and state.ending != "finished":  # the error left the loop
            self._state.update(phase="step")  # a hang on the way out is one
        self.failing = True
        if not print_refusal(self._rank, error, trace):
            self._hook(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt):
            leave(128 + signal.SIGINT)
        atexit._run_exitfuncs()
        leave(exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    """Exit code of the contract for an error that ends the process."""
    if is_peer_loss(error):
        return ExitCode.PEER_LOST
    if isinstance(error, HardwareError) or (
        isinstance(error, RuntimeError) and devices.is_fault(str(error))
    ):
        return ExitCode.HARDWARE
    if isinstance(error, ConfigError) or cure_of(error):
        return ExitCode.BAD_CONFIG
    if isinstance(error, DivergedError):
        return ExitCode.DIVERGED
    return 1


# --- Calls in which the ranks differ --------------------------------------------------------------
# A rank that makes another call than the rest cannot say so by a collective: the others wait in
# another one, for gradients say. So a rank that gets no further writes its last calls into the
# store, from a thread, and compares them with those that another rank has written.

_FIRST_LOOK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 8.0


class CallMismatch:
    """One process's side of comparing the ranks' calls. Does nothing in a run of one rank."""

    def __init__(self, world: World, shutdown: Shutdown) -> None:
        self._world = world
        self._shutdown = shutdown
        self._over = threading.Event()
        if world.size > 1:
            threading.Thread(target=self._watch, name="call mismatch", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        pause, before = _FIRST_LOOK_SECONDS, -1
        while not self._over.wait(pause):
            reached, board = self._shutdown.reached, self._world.board
            if reached != before:
                pause, before = _FIRST_LOOK_SECONDS, reached
                continue
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)
            try:
                if board is not None:
                    self._look(board)
            except RuntimeError:  # the store is gone; the main thread hears of it too
                return

    def _look(self, board: Board) -> None:
        """End this process if another makes other calls: one waits for what will not come."""
        rank = self._world.rank
        for number, what in list(self._shutdown.calls):
            other, data = board.first("call", number, rank, what.encode())
            if (there := data.decode()) != what:
                error = other_call((other, there), (rank, what))
                self._shutdown.refuse(board.refusal(str(error)))
