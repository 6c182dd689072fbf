"""A gang of real training processes, forked from this one because torch is imported already.

What the forked ranks run is the library as it ships: gloo between them, snapshots on disk,
SIGKILL for real. The launcher has tests of its own, which start it as a program.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from support.launching import free_ports
from support.patience import PATIENCE, wait_for
from support.rounds import COLD, Outcome, Training

Program = Callable[[int], None]
_LAST_WORDS = 8000  # characters: the stacks of all threads, when a rank hung
_libc = ctypes.CDLL(None)


@dataclass
class Gang:
    """Starts ranks; remembers them so that none is left behind."""

    directory: Path
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid

    def start(
        self, program: Program, *, world: int = 3, env: Mapping[str, str] | None = None
    ) -> None:
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": "test",
            **(env or {}),
        }
        for rank in range(world):
            self.spawn(program, rank, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    def spawn(self, program: Program, rank: int, env: Mapping[str, str]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.pids[rank] = pid
            return
        code = 1
        try:
            gc.freeze()  # garbage of tests before may own threads, which are not here to be joined
            _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            # What pytest's own workers have set is no handler of a script's.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if os.getppid() != parent:
                os._exit(1)
            log = os.open(self.log_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            # pytest has put its own objects in the place of the streams.
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            os.environ.update(env)
            program(rank)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(code)

    def log_path(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def log(self, rank: int) -> str:
        return self.log_path(rank).read_text()

    def last_words(self) -> str:
        """The end of each rank's log."""
        logs = sorted(self.directory.glob("rank*.log"))
        return "\n".join(f"--- {path.stem}\n{path.read_text()[-_LAST_WORDS:]}" for path in logs)

    def wait(self, seconds: float = PATIENCE) -> dict[int, int]:
        """Exit code, or -signal, of every rank; fails when one does not end."""
        codes: dict[int, int] = {}
        deadline = time.monotonic() + seconds
        while self.pids:
            for rank, pid in list(self.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del self.pids[rank]
                    codes[rank] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                running = list(self.pids)
                self.end()
                pytest.fail(f"ranks {running} did not end")
            time.sleep(0.005)
        return codes

    def run(
        self, program: Program, *, world: int = 3, env: Mapping[str, str] | None = None
    ) -> dict[int, int]:
        self.start(program, world=world, env=env)
        return self.wait()

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()


@pytest.fixture(scope="module")
def gang_in() -> type[Gang]:
    """A gang whose logs are in a directory, for what a module's tests share."""
    import torch._dynamo
    import torch.distributed

    assert torch.distributed.is_available()
    return Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    # Ranks are forked from here: what they would all import lazily is imported once.
    import torch._dynamo
    import torch.distributed

    assert torch.distributed.is_available()
    found = Gang(tmp_path)
    yield found
    found.end()
    print(found.last_words())  # pytest shows it below a failure


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the training of support.rounds ends with when nobody is killed."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    training.launch(*COLD)
    assert training.codes() == [0], training.errors
    return training.outcome()


@pytest.fixture
def wait_until() -> Callable[..., object]:
    return partial(wait_for, every=0.02)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + text)
        return str(path)

    return write


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path / "training")
    yield found
    found.end()
