"""Read step, loss and further numbers from the lines that a program prints, for show only.

The supervisor's loop calls Reading.look(), which feeds the newest lines of rank 0 to a Reader and
says once what it recognized; /state and /metrics show what was read where the library reports no
steps. Any program may print anything, so these numbers decide nothing. A table knows the usual
forms of loops and progress bars; spec.output adds expressions of the user.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ddpjob_contract.output import patterns
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.liveness.heartbeat import RankState

# --- Numbers in lines -----------------------------------------------------------------------------

#: Characters of a line that are read: the usual forms begin with their numbers.
MOST: Final = 500
_LONGEST: Final = 32  # characters of a number
_GREATEST: Final = 10**12  # steps; more is an identifier or a time
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER: Final = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan\b|inf\b)"
#: Not val_loss or "val loss", and none of several losses (Loss_D).
_LOSS: Final = re.compile(
    r"(?<![\w/])(?<!val )(?<!eval )(?<!test )(?<!valid )(?<!validation )(?<!Val )(?<!Test )"
    r"(?:(?:train(?:ing)?|total|batch|running)[_/ ])?loss(?:/train)?['\"]?\s*[:=]?\s*"
    rf"['\"]?(?:tensor\()?({_NUMBER})",
    re.IGNORECASE,
)
_BAR: Final = re.compile(r"(.*?)\d{1,3}%\s?\|[^|]*\|\s*(\d+)/(\d+)\s*\[([^\]]*)")
_ODD_UNIT: Final = re.compile(
    r"[\d.?](?! ?(?:it|steps?|batch(?:es)?|iter)/s|s/(?:it|steps?|batch|iter))[ A-Za-z]+/[A-Za-z]"
)
_RATE: Final = re.compile(r"([\d.]+)it/s")
_MOST_RATE: Final = 20_000.0  # per second: what is faster counts bytes or rows
_EPOCH: Final = r"\bEpoch\b(?:\(train\))?['\"]?\W{0,4}(\d+)(?![.\d])(?:\s*/\s*(?:-\d+|(\d+)))?"
#: Each with epoch, epochs, counter and its end. A counter of samples is shown as it is.
_WITHIN: Final = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        _EPOCH + r"\W{1,60}(?:(?:Step|Iter(?:ation)?|Batch)\b\W{0,4})?(\d+)\s*/\s*(\d+)",
        r"^\W{0,4}Train(?:ing)?\W{1,3}(\d+)()\s+\[\s*(\d+)/(\d+)",  # timm
        r"(?:^|\bTrain: ?)\[(\d+)/(\d+)\]\s*\[(\d+)/(\d+)\]",  # pytorch/examples dcgan
    )
)
#: At the start of an epoch: how many steps each has.
_BEGINS: Final = re.compile(_EPOCH + r"\s*\|[^|]*\|\s*Steps: (\d+)", re.IGNORECASE)
_STEP: Final = re.compile(
    r"(?<![\w/.-])(?<!per )(?:train(?:er)?[_/])?(?:global_)?(?:step|iter|iteration|batch)\b"
    r"(?:\(train\))?['\"]?\s*[:=#]?\s*\[?\s*"
    r"(\d+(?:,\d{3})*)(?:\s*/\s*(\d+(?:,\d{3})*))?(?![\d.,]*[A-Za-z%]|[\d,]*\.\d|_?\d)",
    re.IGNORECASE,
)
_TRAINS: Final = re.compile(r"\b(?:train|epoch|step|iter|fit)", re.IGNORECASE)
_OTHER: Final = re.compile(
    r"\b(?:val|valid|validation|validating|eval|evaluat\w*|test|testing|predict\w*|sanity|infer\w*"
    r"|sampl\w*|generat\w*|download\w*|load\w*|fetch\w*|map|filter|token\w*|extract\w*|sav\w+"
    r"|resolv\w*|pack\w*|preprocess\w*|epochs|train_runtime)\b",
    re.IGNORECASE,
)
#: What a bar may count besides.
_PREPARES: Final = re.compile(
    r"\b(?:prepar|read|comput|cach|scan|writ|warmup|build|filter)\w*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What was read last. ``loss`` is finite."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Reader:
    """Reads lines one after another. ``recognized``: by which forms, in words.

    ``search`` runs an expression of the user, which may take for ever: it returns None then.
    """

    def __init__(
        self,
        output: Mapping[str, Any],
        search: Callable[[re.Pattern[str], str], re.Match[str] | None] = re.Pattern.search,
    ) -> None:
        self.numbers = Numbers()
        self.recognized: dict[str, str] = {}
        self._forms, self._search = output.get("forms") != "Never", search
        self._own = {field: re.compile(one) for field, one in patterns(output).items()}
        self._from_zero = False  # epochs are counted from 0
        self.begin()

    def begin(self) -> None:
        """Start over with a round: the program begins again."""
        self.numbers = Numbers(metrics=self.numbers.metrics)
        self._rank = 0  # the surest form that was seen: others do not count beside it
        self._lap, self._begun = (0, 0), 0  # a counter and its end; how often it began again
        self._ran = 0  # seconds of that bar
        self._bar: tuple[int, bool] = (0, False)  # its end, whether with loss

    def read(self, line: str) -> None:
        """Take in a line without its end."""
        line = _ESCAPE.sub("", line[:MOST])
        if self._forms and any(map(str.isdigit, line)):
            self._usual(line)
        self._users(line)

    # --- Expressions of the user ---------------------------------------------------------

    def _users(self, line: str) -> None:
        for of, pattern in self._own.items():
            found = self._search(pattern, line)
            value = _number(found[1]) if found and found[1] else None
            if value is None:
                continue
            if of == "loss":
                self._set(loss=value if math.isfinite(value) else None)
            elif of.startswith("metrics."):
                metrics = {**self.numbers.metrics, of.removeprefix("metrics."): value}
                self._set(metrics=metrics if math.isfinite(value) else self.numbers.metrics)
            elif of == "step" and 0 <= value <= _GREATEST:
                self._set(step=int(value))
            elif of == "totalSteps" and 1 <= value <= _GREATEST:
                self._set(total_steps=int(value))

    # --- The usual forms -----------------------------------------------------------------

    def _usual(self, line: str) -> None:
        """Read by the first form that fits; where the user has an expression, that counts."""
        loss = _LOSS.search(line)
        if bar := _BAR.match(line):
            other = not self._read_bar(bar, with_loss=loss is not None)
        else:
            other = self._read_text(line, with_loss=loss is not None) is not None
        if loss and not other and "loss" not in self._own:
            value = _number(loss[1])
            self._set(loss=value if value is not None and math.isfinite(value) else None)
            self.recognized.setdefault("loss", loss[0])

    def _read_text(self, line: str, *, with_loss: bool) -> re.Match[str] | None:
        """Read a counter; return the word before it by which it is not of training."""
        for form in _WITHIN:
            if found := form.search(line):
                other = _OTHER.search(line[: found.start(3)])
                if not other:
                    rich = "━" in found[0]  # Lightning's, which shows its last epoch's number
                    self._within(*found.groups(), text=found[0], rank=3, last=rich)
                return other
        if found := _BEGINS.search(line):
            self._within(found[1], found[2], "0", found[3], text=found[0], rank=3)
        elif found := _STEP.search(line):
            other = _OTHER.search(line[: found.start()])
            if with_loss and not other:  # else it is prose
                step, total = (int(n.replace(",", "")) for n in (found[1], found[2] or "0"))
                self._count(found[0], step, total, rank=4)
            return other
        return _OTHER.search(line[: line.lower().find("loss")]) if with_loss else None

    def _read_bar(self, bar: re.Match[str], *, with_loss: bool) -> bool:
        """Read a progress bar; return whether it may be one of training."""
        name, step, end = bar[1].strip(), int(bar[2][:_LONGEST]), int(bar[3][:_LONGEST])
        rate = _RATE.search(bar[4])
        fast = rate is not None and (_number(rate[1]) or 0.0) > _MOST_RATE
        if _OTHER.search(name) or _PREPARES.search(name):
            return False
        # Its rate comes first; what a script adds may count tokens per second.
        if fast or _ODD_UNIT.search(",".join(bar[4].split(",")[:2])) or step > end:
            return True
        trains = (with_loss and name) or _TRAINS.search(name)
        epoch = re.search(_EPOCH, name, re.IGNORECASE) or re.match(r"(\d+)/(\d+)\s", name)  # YOLO
        if epoch:
            self._within(epoch[1], epoch[2], bar[2], bar[3], text=bar[0], rank=2)
        elif trains and name.rstrip(": ").lower() != "epoch":
            self._count(name, step, end, rank=2)
        elif not name and step:
            return self._read_unnamed(bar[0], step, end, with_loss=with_loss)
        return True

    def _read_unnamed(self, text: str, step: int, end: int, *, with_loss: bool) -> bool:
        """Read a bar without a name: the loop's, or each epoch's; False: something else."""
        length, had_loss = self._bar
        if end != length:
            # A bar beside the first one is of an evaluation, unless it looks more like a loop.
            longer = _seconds(text) > self._ran
            if length and not longer and not (with_loss and not had_loss):
                return False
        self._ran = _seconds(text)
        self._bar = (end, with_loss or (had_loss and end == length))
        self._count(text, step, end, rank=1)
        return True

    def _within(
        self, epoch: str, epochs: str | None, step: str, end: str,
        *, text: str, rank: int, last: bool = False,
    ) -> None:  # fmt: skip
        """Make one number of an epoch and a counter in it."""
        ended, length = int(epoch[:_LONGEST]), int(end[:_LONGEST])
        self._from_zero = self._from_zero or not ended or last
        ended -= not self._from_zero
        total = (int(epochs[:_LONGEST]) + last) * length if epochs else 0
        self._count(text, ended * length + int(step[:_LONGEST]), total, rank=rank)

    def _count(self, text: str, step: int, total: int, *, rank: int) -> None:
        if "step" in self._own or rank < self._rank or not 0 <= step <= _GREATEST:
            return
        self._rank = rank
        self.recognized["step"] = text
        if rank != 3 and total:  # a counter that begins again with each epoch
            before, length = self._lap
            self._begun = (self._begun + (step < total / 2 < before)) * (total == length)
            self._lap = step, total
            step, total = self._begun * total + step, 0 if self._begun else total
        self._set(step=step)
        if "totalSteps" not in self._own:
            self._set(total_steps=total if step <= total <= _GREATEST and total else None)

    def _set(self, **changes: object) -> None:
        self.numbers = replace(self.numbers, **changes)  # type: ignore[arg-type]


def _seconds(bar: str) -> int:
    """Read for how long a bar has run: of two without names the longer is the training."""
    parts = re.findall(r"\d+", bar.rpartition("[")[2].partition("<")[0])[:3]
    return sum(int(n[:9]) * 60**i for i, n in enumerate(reversed(parts)))


def _number(text: str) -> float | None:
    """Read a number, also with commas between its thousands; None if it is none."""
    try:
        return float(text[:_LONGEST].replace(",", ""))
    except ValueError:
        return None


# --- Steps per second -----------------------------------------------------------------------------

_WINDOW_SECONDS: Final = 60.0


class Pace:
    """A round's steps per second in the last minute, or of the last two slower changes."""

    def __init__(self) -> None:
        self._marks: tuple[tuple[float, int], ...] = ()  # when a step was first seen, oldest first

    def poll(self, state: RankState | None, now: float) -> None:
        """Take in a worker's record."""
        if state is None or state.phase == "startup":
            return
        self.count(state.step, now)

    def count(self, step: int, now: float) -> None:
        """Take in a count of steps; one that falls begins again."""
        marks = self._marks
        if marks and step < marks[-1][1]:
            marks = ()
        if not marks or marks[-1][1] != step:
            marks = (*marks, (now, step))
        while len(marks) > 2 and marks[1][0] <= now - _WINDOW_SECONDS:
            marks = marks[1:]
        self._marks = marks

    def per_second(self, now: float) -> float | None:
        """Return the rate, None before two changes."""
        marks = self._marks
        if len(marks) < 2:
            return None
        rate = (marks[-1][1] - marks[0][1]) / (now - marks[0][0])
        return float(f"{rate:.4g}")


# --- The newest lines of rank 0 -------------------------------------------------------------------

_EVERY_SECONDS: Final = 0.25
#: Of processor time, so a busy machine cuts nothing off. The hub hears nothing meanwhile.
_MOST_SECONDS: Final = 0.1


class Reading:
    """Numbers of the present round, for show only. ``output``: spec.output."""

    def __init__(
        self, output: Mapping[str, Any], say: Callable[[str], None], *, forms: bool = True
    ) -> None:
        """Take ``forms`` False for a program that uses the library, which reports its steps."""
        self._say = say
        self._slow: set[str] = set()
        self._searching = False
        self._said = self._due = 0.0
        self.pace = Pace()
        given = output if forms or output.get("forms") else {**output, "forms": "Never"}
        self.reader = Reader(given, self._search)
        self.off = given.keys() <= {"forms"} and given.get("forms") == "Never"

    def begin(self) -> None:
        """Start over with a round."""
        self.reader.begin()
        self.pace = Pace()

    def look(self, pump: OutputPump, now: float, *, last: bool = False) -> bool:
        """Read the lines that are new; return whether it did. ``last``: at once."""
        if self.off or (now < self._due and not last):
            return False
        self._due = now + _EVERY_SECONDS
        # The launchers' link waits meanwhile: what this time does not suffice for is not read.
        until = time.thread_time() + _MOST_SECONDS
        for line in pump.fresh():
            if time.thread_time() < until:
                self.reader.read(line)
        if self.reader.numbers.step is not None:
            self.pace.count(self.reader.numbers.step, now)
        if self.reader.recognized and not self._said:
            self._said = now
            found = "; ".join(
                f"{of} in {text.strip()[:60]!r}" for of, text in self.reader.recognized.items()
            )
            self._say(
                f"read from the output, only to be shown: {found}; to read otherwise set"
                " spec.output (run --read 'step=REGEX'), to read nothing its forms: Never"
                " (run --read never)"
            )
        return True

    def facts(self) -> dict[str, float] | None:
        """Return State.printed, None while nothing was read."""
        found, rate = self.reader.numbers, self.pace.per_second(time.monotonic())
        values = {"step": found.step, "totalSteps": found.total_steps, "loss": found.loss}
        values["stepsPerSecond"] = rate
        return {name: value for name, value in values.items() if value is not None} or None

    def metrics(self) -> dict[str, float]:
        """Return values by the names of the library's metrics."""
        found = self.reader.numbers
        values = {"step": found.step, "loss": found.loss}
        return {name: float(value) for name, value in values.items() if value is not None}

    def _ring(self, signum: int, frame: object) -> None:
        if self._searching:
            self._searching = False
            raise TimeoutError

    def _search(self, pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
        if pattern.pattern in self._slow:
            return None
        try:
            signal.signal(signal.SIGVTALRM, self._ring)
            self._searching = True
            signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
            found = pattern.search(line)
            self._searching = False
        except TimeoutError:
            self._slow.add(pattern.pattern)
            self._say(
                f"warning: the expression {pattern.pattern!r} of spec.output took more than"
                f" {_MOST_SECONDS:g} s for one line and is left out from now on: avoid repeats of"
                " repeats, such as (a+)+"
            )
            return None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return found
