"""Keep the numbers that the script logs itself, and send a run's curves to its sinks."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from numbers import Real
from typing import Final, SupportsFloat

import torch

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.accelerator import Number
from ddpjob_trainer.printing import say

# --- run.log() ------------------------------------------------------------------------------------

Keep = Callable[[torch.Tensor], Number]
Values = Mapping[str, SupportsFloat]  # converted when they are published


def checked(values: Mapping[str, object], keep: Keep = torch.Tensor.item) -> Values:
    """Return the values, ready to be kept. ``keep``: converts a tensor.

    Raises ConfigError for anything but numbers and tensors of one element.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"run.log() needs a dict of numbers by name, not {values!r:.80}")
    for name in values:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"run.log(): names must be strings, not {name!r}")
    return {name: number_of(f"run.log(): {name!r}", value, keep) for name, value in values.items()}


def number_of(what: str, value: object, keep: Keep = torch.Tensor.item) -> Number:
    """Return a script's number, or a kept tensor of one element. Raises ConfigError."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ConfigError(
                f"{what} is a tensor {list(value.shape)} of {value.dtype}; give one real number, as"
                " value.mean()"
            )
        return keep(value.detach())
    if isinstance(value, Real):  # numpy's numbers, too
        try:
            return float(value)
        except OverflowError:  # a whole number that no float can hold
            return -math.inf if value < 0 else math.inf
    raise ConfigError(
        f"{what} is a {type(value).__name__}; give a number or a tensor of one element"
    )


class Pending:
    """Rank 0's logged values, until they are published."""

    def __init__(self) -> None:
        self.at_once = False  # outside of steps values are published at once
        self._rows: list[tuple[int, Values]] = []
        self.ended: deque[list[tuple[int, Values]]] = deque()  # of ended steps, not published yet
        self._names: set[str] = set()
        self._begun = False

    def begin(self, step: int) -> None:
        """Start after ``step``; drop rows of steps up to it, which are published already."""
        self._begun = True
        if step:
            self._rows = [row for row in self._rows if row[0] > step]

    def add(self, step: int, values: Values) -> None:
        """Add values; of equal steps and names the last one counts."""
        self._names.update(values)
        self._rows.append((step, values))

    def step_ended(self) -> None:
        """End a step: later values belong to the next one."""
        self.ended.append(self._rows)
        self._rows = []

    def take(self, *, step: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the rows to publish now, as numbers: this may wait for the device.

        ``step``: only rows of the oldest ended step that is not published.
        """
        if not self._begun:
            return
        if step and self.ended:
            rows = self.ended.popleft()
        else:
            rows = [*chain(*self.ended), *self._rows]
            self.ended.clear()
            self._rows = []
        for number, values in rows:
            yield number, {name: float(value) for name, value in values.items()}

    def without_users(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the run's own numbers, without names that the script uses itself."""
        return {name: value for name, value in values.items() if name not in self._names}


# --- Sinks ----------------------------------------------------------------------------------------
# Progress calls it, on rank 0 only. A sink that fails, or is so slow that its queue is full,
# loses values, with one warning. Neither ends training nor delays it.

#: The most rows waiting for a sink: an hour without a network, at a row per second.
MAX_WAITING: Final = 4096
#: So long the end of a run waits for sinks: a short run may end before a client is imported.
CLOSE_SECONDS: Final = 60.0
#: And so long if the process must end soon.
HURRY_SECONDS: Final = 1.0

#: Takes numbers of a step, by name. A step may come several times, with other names.
Log = Callable[[int, dict[str, float]], None]
#: Opens a sink after so many finished steps (0: a fresh start).
Opener = Callable[[int], Log]


def tensorboard(directory: str, step: int) -> Log:
    """Write scalars for TensorBoard; hide later steps of an earlier process.

    Raises ImportError, OSError.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("the package is missing; pip install tensorboard") from error
    writer = SummaryWriter(directory, purge_step=step + 1)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a kill comes without notice

    return log


class Sink:
    """One sink's queue and thread."""

    def __init__(self, name: str, opener: Opener) -> None:
        self._name = name
        self._opener = opener
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def start(self, step: int) -> None:
        """Begin after ``step`` finished steps."""
        # A daemon: a hanging client must not keep the process alive.
        self._thread = threading.Thread(target=self._work, args=(step,), daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Pass numbers of a step on. Returns at once."""
        if self._rows.qsize() < MAX_WAITING:
            self._rows.put((step, dict(values)))
        else:
            self._warn("is too slow or does not answer", "values are left out")

    def finish(self) -> None:
        """Let the thread end after the rest."""
        self._rows.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until the sink has taken the rest, ``seconds`` at most."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._warn("has not taken all values", "it does not answer")

    def _work(self, step: int) -> None:
        log: Log | None = None
        openers = [self._opener]  # tried once
        while (row := self._rows.get()) is not None:
            try:
                if openers:
                    log = openers.pop()(step)
                if log is not None:
                    log(*row)
            except Exception as error:  # a service's client may raise anything
                text = str(error).strip().partition("\n")[0] or type(error).__name__
                self._warn("takes no values", f"{text}; training goes on")

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            say(0, f"warning: {self._name} {what}: {text}")
