"""Collect what this launcher knows of a round, while it runs and when it has ended.

The supervisor calls it at each stage of a round; files flow through evidence/folder to the folder
beside the snapshots. Nothing here waits for a disk but end(), for a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from ddpjob_contract import ExitCode, Round
from ddpjob_contract.evidence import EVIDENCE_VERSION, End, Evidence, RankEnd
from ddpjob_contract.text import without_credentials
from ddpjob_trainer.evidence import folder
from ddpjob_trainer.evidence.folder import Entry, Flight, Writer, flight_name
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.launch_config import LaunchConfig
from ddpjob_trainer.launcher.output import KEPT_LINES
from ddpjob_trainer.launcher.printed import Reading
from ddpjob_trainer.launcher.reports.curves import Curves
from ddpjob_trainer.launcher.reports.state import known, numbers
from ddpjob_trainer.launcher.reports.termination import Ended
from ddpjob_trainer.launcher.worker_group import WorkerGroup
from ddpjob_trainer.liveness.heartbeat import VALUES, read_report

#: Gives the last lines of a rank, so many at most.
Tail = Callable[[int, int], list[str]]

#: Between two looks for new lines, for a pod that is killed as a whole; the first comes sooner.
_EVERY_SECONDS: Final = 10.0
_FIRST_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 1.0  # between two points of a curve
_CURVES_SECONDS: Final = 60.0  # between two files without new lines
#: A gang's launchers write so many files a second together at most.
_FILES_A_SECOND: Final = 10
#: At the launcher's end: for the last file, less if it was asked to end.
_PATIENCE_SECONDS: Final = 2.0
_HURRY_SECONDS: Final = 0.5
_UPLOAD_SECONDS: Final = 5.0
_MOST_WORDS: Final = 400  # on an upload that failed
#: torch's variables for where NCCL's flight recorder writes, the newer first, and its defaults.
_FLIGHT_ENV: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_DEFAULTS: Final = ("~/.cache/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_")


class Keeper:
    """Keeps one launcher's evidence; without a snapshot directory it does nothing."""

    def __init__(self, config: LaunchConfig, say: Callable[[str], None], reading: Reading) -> None:
        root = config.env.snapshot_dir
        self._writer = Writer(root, say) if root else None
        self._config, self._reading, self._say = config, reading, say
        self._workers: WorkerGroup | None = None  # before the first round
        self._last: Evidence | None = None  # of a round that is over

    def begin(self, config: LaunchConfig, workers: WorkerGroup, tail: Tail, now: float) -> None:
        """Turn to a round that begins."""
        self._config, self._workers, self._tail = config, workers, tail
        self._tails: list[list[str]] = []
        self._curves, self._stacks = Curves(), ""
        self._drawn: dict[str, list[list[float]]] = {}  # as written
        self._stale = self._reading.reader.numbers.metrics  # of the round before
        self._began = time.time()
        self._due, self._look_due, self._curves_due = now + _FIRST_SECONDS, now, now
        self._pruned = False  # in this round
        self._last = None

    def tick(self, stacks: str, now: float) -> None:
        """Write last lines and numbers from time to time, if there are new ones."""
        self._stacks = stacks
        workers = self._workers
        if self._writer is None or workers is None or self._last:
            return
        if now >= self._look_due:
            self._look_due = now + _LOOK_SECONDS
            self._look(workers)
        if now < self._due:
            return
        self._due = now + max(_EVERY_SECONDS, self._config.replicas / _FILES_A_SECOND)
        tails, drawn = self._read(), self._curves.read()
        if tails != self._tails or (drawn != self._drawn and now >= self._curves_due):
            self._tails, self._drawn, self._curves_due = tails, drawn, now + _CURVES_SECONDS
            self._put(self._body(workers, tails, over=False))

    def stopped(self, hub: Hub | None, why: str) -> None:
        """Write how the round ended here. ``why``: how the hub was lost, which ended it."""
        workers = self._workers
        if self._writer is None or workers is None or any(one.drill for one in workers.exits):
            return
        tails = self._read()
        self._look(workers)
        self._last = self._body(workers, tails, over=True)
        self._last |= _known(why=why or None, lost=_lost(hub, workers.round))
        self._put(self._last, flights=self._flights())

    def follows(self, records: Sequence[Round]) -> None:
        """Add what ended the round, from the hub's word on the next one."""
        if self._last is not None and records:
            self._last = {**self._last, "cause": records[-1]}
            self._put(self._last)

    def end(self, ended: Ended, hub: Hub | None, why: str, code: int) -> None:
        """Write the round that no other follows, and wait for that a moment."""
        workers = self._workers
        if self._writer is None or workers is None:
            return
        why = why or ended.lost or (ended.end.why if ended.end else "")
        said: Evidence = _known(
            why=why or None, signal=ended.signal or None, report=ended.report,
            lost=_lost(hub, workers.round),
        )  # fmt: skip
        # Without rounds each launcher's hub hears that launcher alone.
        knows = self._config.hub_port is not None or self._config.replicas == 1
        first = ended.end.rank if ended.end and knows else -1
        if first >= 0:
            said["cause"] = {"rank": first, "replica": first // self._config.nproc}
        tails = self._read()
        self._look(workers)
        body = self._body(workers, tails, over=True, signal=ended.signal)
        self._put(body | said, flights=self._flights())
        hurry = ended.signal and code
        self._writer.flush(_HURRY_SECONDS if hurry else _PATIENCE_SECONDS)
        if code and self._config.env.upload:
            self._upload(_PATIENCE_SECONDS if hurry else _UPLOAD_SECONDS)

    def _upload(self, seconds: float) -> None:
        """Copy this launcher's files to the object store, as far as that goes in time.

        Rank 0 uploads with its snapshots, from its own disk: it has ended, and may see no other's.
        """
        names = [f"replica-{self._config.replica}.json"]
        names += [flight_name(rank) for rank in self._ranks]
        root, url = str(self._config.env.snapshot_dir), self._config.env.upload
        order = {"do": "evidence", "url": url, "root": root, "names": names}
        words = (sys.executable, "-m", "ddpjob_trainer.snapshot.remote.process")
        try:
            with subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            ) as process:
                assert process.stdin is not None
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
                why = _why(process, seconds)
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            said = f"last lines and stacks were not uploaded to {url}: {why}"
            self._say(without_credentials(said, url)[:_MOST_WORDS])

    # --- The file --------------------------------------------------------------------------

    @property
    def _ranks(self) -> list[int]:
        return [self._config.rank(local_rank) for local_rank in range(self._config.nproc)]

    def _read(self) -> list[list[str]]:
        return [self._tail(rank, KEPT_LINES) for rank in self._ranks]

    def _look(self, workers: WorkerGroup) -> None:
        """Take in rank 0's newest step, loss and own numbers."""
        if self._config.replica:
            return
        state, printed = workers.state(0), self._reading.reader.numbers
        step, loss = printed.step, printed.loss
        if state is not None and state.phase != "startup":
            step, loss = state.step, state.loss
        values = {} if printed.metrics is self._stale else printed.metrics
        values = {**values, **numbers(read_report(workers.state_dir, VALUES))}
        if step is not None:
            self._curves.add(step, values if loss is None else {"loss": loss, **values})

    def _put(self, body: Evidence, flights: tuple[Flight, ...] = ()) -> None:
        assert self._writer is not None
        replica = body["replica"]
        at = folder.round_folder(body["uid"], body["attempt"], body["round"])
        prunes = replica == 0 and not self._pruned
        self._pruned = True
        self._writer.put(Entry(at, f"replica-{replica}.json", body, prunes, flights))

    def _body(
        self, workers: WorkerGroup, tails: list[list[str]], *, over: bool, signal: int = 0
    ) -> Evidence:
        """``signal``: by which the launcher was to end, and its workers with it."""
        config = self._config
        exits = {one.rank: one for one in workers.exits}
        share = folder.log_share(config.world_size, config.nproc)
        return _known(
            version=EVIDENCE_VERSION,
            uid=config.uid,
            attempt=workers.key.number,
            round=workers.round,
            made=config.attempt,
            pod=socket.gethostname(),
            replica=config.replica,
            nproc=config.nproc,
            state="over" if over else "running",
            began=_time(self._began),
            at=_time(time.time()),
            ranks=[
                self._rank(workers, local, exits.get(config.rank(local)), lines, share, signal)
                for local, lines in enumerate(tails)
            ],
            stacks=self._stacks.encode()[: folder.MOST_STACKS].decode(errors="ignore") or None,
            curves=self._curves.read() or None,
        )

    def _rank(
        self,
        workers: WorkerGroup,
        local_rank: int,
        exit_: Exit | None,
        log: list[str],
        share: int,
        signal: int,
    ) -> RankEnd:
        state = workers.state(local_rank)
        end = _end(exit_, signal, workers.kill_at)
        kept = folder.newest_lines(log, folder.MOST_LOG if end == "failed" else share)
        found: RankEnd = {"rank": self._config.rank(local_rank), "end": end, "log": kept}
        if state and state.phase != "startup":
            found["step"] = state.step
        if state and state.snapshot_step >= 0:
            found["snapshotStep"] = state.snapshot_step
        if exit_ is not None:
            found["code"] = exit_.code
            if exit_.status < 0:
                found["signal"] = -exit_.status
            if exit_.exception:
                found["exception"] = exit_.exception
        return found

    def _flights(self) -> tuple[Flight, ...]:
        """Find what NCCL's flight recorder has written for these ranks in this round."""
        named = next((os.environ[name] for name in _FLIGHT_ENV if os.environ.get(name)), "")
        most = folder.flight_share(self._config.world_size)
        found: dict[int, Flight] = {}
        for rank in self._ranks:
            for prefix in (named,) if named else _FLIGHT_DEFAULTS:
                with contextlib.suppress(OSError, RuntimeError):  # no file, or no home
                    path = Path(f"{prefix}{rank}").expanduser()
                    if path.stat().st_mtime >= self._began:
                        found.setdefault(rank, Flight(rank, path, most))
        return tuple(found.values())


def _why(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for an upload; return why it has not been done."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"not within {seconds:g} s"
    said = process.stderr.read().decode(errors="replace") if code and process.stderr else ""
    return (said.strip().splitlines() or [f"exit code {code}"])[-1] if code else ""


def _end(exit_: Exit | None, signal: int, kill_at: float | None) -> End:
    if exit_ is None:
        return "running"
    # At the end of a grace period, also another launcher's, it is SIGKILL. In the moment itself one
    # was found dead: the round ends for it.
    killed = kill_at is not None and exit_.at > kill_at and exit_.code == ExitCode.SIGKILL
    if exit_.ours or killed or (signal and exit_.code == 128 + signal):
        return "stopped"
    if exit_.status == 0:
        return "succeeded"
    return "followed" if exit_.lost_peer else "failed"


def _lost(hub: Hub | None, round_: int) -> Mapping[str, str] | None:
    """Return the replicas that the hub, if it is here, lost in this round."""
    lost = hub.lost_in.get(round_, {}) if hub is not None else {}
    return {str(replica): how for replica, how in lost.items()} or None


def _known(**found: object) -> Evidence:
    return cast("Evidence", known(found))


def _time(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
