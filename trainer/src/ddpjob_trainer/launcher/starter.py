"""Start a round's workers: from a called spare, else in a fresh interpreter.

The supervisor calls it. It also holds what outlives a round: ``spares``, and the socket of the
store that rank 0 serves. Workers get the key of a round's notes in the store (comm/sealed.py) by a
file descriptor: programs may log their environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
from collections.abc import Callable

import ddpjob_contract as contract
from ddpjob_contract.resume import shown_words
from ddpjob_trainer.environment import KEY_FD, KEY_FILE, ROUND_DRILL, STORE_FD, Key, round_secret
from ddpjob_trainer.launcher import host
from ddpjob_trainer.launcher.host import RuntimeDir
from ddpjob_trainer.launcher.launch_config import LaunchConfig, common_environment, rank_environment
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.processes.spares import Call, Spares
from ddpjob_trainer.launcher.worker_group import WorkerGroup

_REFILL_SECONDS = 0.1
#: A program without our library does not report when it trains; it has started by then.
_STARTED_SECONDS = 10.0


class Starter:
    """Starts the workers of all rounds. ``runtime_dir``: the directory of their records."""

    def __init__(
        self,
        config: LaunchConfig,
        runtime_dir: RuntimeDir,
        selector: selectors.BaseSelector,
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._runtime_dir, self._tell = config, runtime_dir, tell
        self._environment = common_environment(config)
        self._store: socket.socket | None = None
        # Where all ranks are ours, nobody else has to know it.
        own = secrets.token_hex() if config.world_size == config.nproc else ""
        self._token = config.env.token or own
        self._key = -1  # the descriptor of this round's key
        self._rounds = 0  # begun here
        self._more: tuple[str, ...] = ()  # arguments
        self._begun = 0.0
        env = {**self._environment, "PROMETHEUS_MULTIPROC_DIR": str(runtime_dir.metrics)}
        self.spares = Spares(config.program, config.spares, env, config.preload, selector, tell)

    def prepare(self, workers: WorkerGroup) -> None:
        """Have spares ready for a round that the hub will begin. ``workers``: none yet."""
        self._workers = workers
        if self._config.first_round_from_spares:
            self.spares.start()

    def serve(self, config: LaunchConfig) -> None:
        """Start workers of another replica or size from now on; the spares are of those before."""
        self._config = config
        self.spares.forget()

    def go_on(self, newest: str) -> None:
        """Have the next round's workers go on. ``newest``: from which checkpoint, "" for none."""
        if not (asked := self._config.resume_args):
            return
        self._more = self._config.resume_words(newest)
        if self._more:
            self._tell(f"going on with {shown_words(self._more)}")
        else:
            none = f"no checkpoint at {self._config.resume_when}"
            self._tell(f"{none}: training begins again, without {shown_words(asked)}")

    def begin(
        self, workers: WorkerGroup, now: float, drill: str = "Never", reached: int = 0
    ) -> None:
        """Start all workers of a round. ``drill``: whether they may make one.

        ``reached``: the last step that was finished before: they repeat those up to it.
        """
        self._workers = workers
        self._rounds += 1
        drill = f"{drill} {os.getpid()} {now}"
        self._of_round = {ROUND_DRILL: drill, contract.REACHED_STEP: str(reached)}
        self._begun = now
        try:
            workers.state_dir = self._runtime_dir.begin(workers.key)
            self._keep_key(workers.key)
        except OSError as error:  # NoRoomError, for one
            workers.cannot_start(0, error, now)
            return
        self._store = self._store or self._bind_store()
        if self._rounds == 1 and self._config.first_round_from_spares:
            self.spares.start()
        workers.start(lambda local_rank, out, err: self._start(local_rank, out, err, now), now)

    def _keep_key(self, key: Key) -> None:
        """Put a round's key into a file in memory, for all workers of the round."""
        if self._key >= 0:
            os.close(self._key)
            self._key = -1
        if self._token:
            self._key = os.memfd_create(KEY_FILE)
            os.write(self._key, round_secret(self._token, self._config.uid, key.number, key.round))

    def _bind_store(self) -> socket.socket | None:
        """Bind the store's socket that rank 0 gets in every round, ready without a wait.

        It is not listening: a script that does not use it can still bind the port itself.
        """
        config = self._config
        if config.uses_our_library and config.replica == 0 and config.world_size > 1:
            # Held by an earlier attempt's process: then rank 0 itself waits for it.
            with contextlib.suppress(OSError):
                return host.bind(config.master[1])
        return None

    def _start(self, local_rank: int, out: int, err: int, now: float) -> int | None:
        fds = {KEY_FD: self._key} if self._key >= 0 else {}
        if self._store is not None and local_rank == 0:
            fds[STORE_FD] = self._store.fileno()
        env = self._environment_of(local_rank, self._workers.key) | self._of_round
        call = Call(env, out, err, fds, self._more)
        if self._rounds > 1 or self._config.first_round_from_spares:
            with contextlib.suppress(LookupError):
                return self.spares.call(local_rank, call, now)
        return self._spawn(call)

    def _environment_of(self, local_rank: int, key: Key) -> dict[str, str]:
        return rank_environment(self._config, local_rank, key, self._runtime_dir)

    def _spawn(self, call: Call) -> int:
        fds = {name: str(fd) for name, fd in call.fds.items()}
        env = {**self._environment, **call.env, **fds}
        command = (*self._config.command, *call.arguments)
        return children.spawn(command, env, call.out, call.err, tuple(call.fds.values()))

    # --- Spares --------------------------------------------------------------------------

    def hand_over(self, now: float) -> None:
        """Give their group those who were called during their fork, or a fresh process instead."""
        for local_rank, came in self.spares.arrivals():
            try:
                pid = came if isinstance(came, int) else self._spawn(came)
                self._workers.arrived(local_rank, pid)
            except OSError as error:
                self._workers.cannot_start(local_rank, error, now)
            if isinstance(came, Call):
                came.close()

    def recall(self) -> None:
        """Cancel the calls of those that their group awaits no more, before a spare gets them."""
        self.spares.recall(self._workers.awaited)

    def refill(self, now: float, *, parked: bool = False) -> float | None:
        """Order spares once training is under way, or ``parked``; return when to call next."""
        due = self.spares.tick(now)
        self.hand_over(now)
        if self.spares.full or (self._workers.stopping and not parked):
            return due
        elastic = self._config.elastic is not None and self._workers.key.round < 0
        if elastic or self._config.replica >= self._config.replicas:
            # Modules may read the rank as they are imported, and this pod has none before Go.
            self.spares.start()
            return due
        silent = not self._config.uses_our_library
        started = self._workers.is_training() or (silent and now > self._begun + _STARTED_SECONDS)
        if parked or started:
            number, round_ = self._workers.key
            following = Key(number, round_ + 1)
            self.spares.refill(
                lambda local_rank: self._environment_of(local_rank, following),
                compiler=self._workers.compiles(),
            )
        return min(due or now + _REFILL_SECONDS, now + _REFILL_SECONDS)
