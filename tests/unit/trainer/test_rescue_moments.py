"""Every moment at which a rescue may read a process, beside every moment of its training.

What is read is a boundary's state, or nothing; each wrong variant of that is found.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from ddpjob_trainer.snapshot.training_state import flat_sha256
from ddpjob_trainer.training.rescue import Boundary, ChangedError, word_of
from support.trained import Trained

STEPS = 2


@pytest.fixture(autouse=True)
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors, thousands of times
    yield
    torch.set_num_threads(threads)


class BlockedError(Exception):
    """The training thread would wait here."""


class TellsLock:
    """A lock of one thread: nobody waits in it."""

    def __init__(self) -> None:
        self.held = False

    def acquire(self, timeout: float | None = None) -> bool:
        if self.held and timeout is None:
            raise BlockedError
        was, self.held = self.held, True
        return not was

    def release(self) -> None:
        self.held = False


def training(trained: Trained, sums: set[str], harm: Callable[[Trained], None]) -> Iterator[None]:
    """Train; pause at each moment. ``sums``: of all boundaries."""
    half = [p for number, p in enumerate(trained.net.parameters()) if number % 2]
    for step in range(1, STEPS):
        yield
        trained.body()
        yield
        harm(trained)
        yield
        trained.boundary.wait_for_readers()
        yield
        with torch.no_grad():
            for parameter in half:  # half of it, as a reader may see it
                parameter.add_(1.0)
        yield
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        yield
        trained.boundary.take(step)
        sums.add(trained.sha256())
    yield


def read_at(begin: int, end: int, kind: type[Boundary], harm: Callable[[Trained], None]) -> str:
    """Read from one moment to a later one; return what was found wrong."""
    trained = Trained(kind)
    trained.boundary._lock = TellsLock()  # type: ignore[assignment]
    trained.step(0)
    sums = {trained.sha256()}
    moments = training(trained, sums, harm)
    for _ in range(begin + 1):
        next(moments, None)
    with suppress(ChangedError), trained.boundary.reading(0):
        captured = trained.boundary.captured(0)
        with suppress(BlockedError):
            for _ in range(begin, end):
                next(moments, None)
        if flat_sha256(captured.flat) not in sums and trained.boundary.unchanged():
            return f"from {begin} to {end}"
    return ""


def found(kind: type[Boundary], harm: Callable[[Trained], None]) -> list[str]:
    moments = range(6 * (STEPS - 1) + 1)
    return [at for b in moments for e in moments if b <= e and (at := read_at(b, e, kind, harm))]


class KeepsNoBuffers(Boundary):
    def _copy(self, step: int) -> None:
        super()._copy(step)
        self._backups = []


class LooksAtNoVersion(Boundary):
    def unchanged(self) -> bool:
        return True


def test_a_step_of_several_updates_can_be_read_at_any_moment():
    """Between them nobody holds a boundary: it is a copy."""
    trained = Trained()
    trained.boundary._lock = TellsLock()  # type: ignore[assignment]
    trained.boundary.keeps_whole = True  # as the first update() amid a step has it
    trained.step(0)
    then = trained.sha256()
    for _ in training(trained, set(), average_reset):
        with trained.boundary.reading(0):
            assert trained.boundary.unchanged()
            known = flat_sha256(trained.boundary.captured(0).flat)
        assert (known == then) == (trained.boundary.step == 0)
    assert known == trained.sha256()


class IsReadDuringAnUpdate(LooksAtNoVersion):
    def wait_for_readers(self) -> None:
        """Nobody waits."""

    def take(self, step: int) -> None:
        self._updating = self._lock.acquire()
        super().take(step)


def nothing(trained: Trained) -> None:
    pass


def norm_kept(trained: Trained) -> None:
    """As Embedding(max_norm=...) does in its forward."""
    with torch.no_grad():
        trained.net[0].weight.mul_(0.5)


def swapped(trained: Trained) -> None:
    trained.net[0].weight.data = torch.zeros_like(trained.net[0].weight)


def average_reset(trained: Trained) -> None:
    for state in trained.optimizer.state.values():
        state["exp_avg"].zero_()


def restarted(trained: Trained) -> None:
    trained.optimizer.state.clear()


HARMS = (nothing, norm_kept, swapped, average_reset, restarted)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_what_is_read_is_a_boundary_at_any_moment(harm):
    assert found(Boundary, harm) == []


@pytest.mark.parametrize(
    ("kind", "harm"),
    [(IsReadDuringAnUpdate, nothing), (KeepsNoBuffers, nothing)]
    + [(LooksAtNoVersion, harm) for harm in HARMS[1:]],
)
def test_each_wrong_way_to_read_is_found_out(kind, harm):
    assert found(kind, harm)


@pytest.mark.parametrize("shares", [True, False])
def test_each_survivor_has_the_buffers_of_rank_0(shares):
    """Which commit() broadcasts: in the next forward, as DDP does, rank 0 may be gone."""
    gang = [Trained() for _ in range(3)]
    for step in range(1, STEPS):
        for rank, one in enumerate(gang):
            torch.manual_seed(100 * step + rank)
            one.forward()
        for first, *others in zip(*(one.net.buffers() for one in gang), strict=True):
            for other in others if shares else ():
                other.copy_(first)
        for one in gang:
            for mine, first in zip(one.net.parameters(), gang[0].net.parameters(), strict=True):
                assert mine.grad is not None
                mine.grad = first.grad
            one.boundary.wait_for_readers()
            one.optimizer.step()
            one.teacher.load_state_dict(gang[0].teacher.state_dict())
            one.boundary.take(step)
    words = {word_of(step, one.boundary.captured(0)) for one in gang}
    assert len(words) == (1 if shares else 3)
