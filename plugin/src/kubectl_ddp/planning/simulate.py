"""Draw the failures of many runs and add up what became of them: compare.py and text.py ask.

Only the gang's failures are drawn, at the sum of its nodes' rates: 100,000 GPUs take no longer
than 8. The same seed draws the same failures for each option, so that their gains compare.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from kubectl_ddp.planning.parts import DAY, Parts
from kubectl_ddp.planning.story import Book, Fault, play

FAILURES = 5_000  # in all runs together, about
MOST_FAILURES = 2_000  # of a run, about: it is made shorter
_RUNS = (10, 300)
_TENTH = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``runs`` runs of ``seconds`` each came to."""

    goodput: float  # of all together
    low: float  # a tenth of the runs had less
    high: float  # a tenth had more
    book: Book  # shares, which add up to 1
    steps_per_day: float
    repeated_per_day: float  # steps
    runs: int
    seconds: float


def simulate(parts: Parts, *, seconds: float = 30 * DAY, seed: int = 1) -> Outcome:
    """Play runs with random failures."""
    seconds = min(seconds, MOST_FAILURES / parts.rate)
    runs = int(min(_RUNS[1], max(_RUNS[0], FAILURES / (seconds * parts.rate))))
    book, found, steps, repeated = Book(), list[float](), 0, 0
    for number in range(runs):
        account = play(parts, _faults(parts, Random(f"{seed}/{number}")), seconds)
        for key, spent in account.book.items():
            book[key] = book.get(key, 0.0) + spent
        found.append(account.goodput)
        steps += account.steps
        repeated += account.repeated
    found.sort()
    total = sum(book.values())
    days = runs * seconds / DAY
    return Outcome(
        goodput=book.get(("productive", ""), 0.0) / total,
        low=found[int(_TENTH * (runs - 1))],
        high=found[math.ceil((1 - _TENTH) * (runs - 1))],
        book={key: spent / total for key, spent in book.items()},
        steps_per_day=steps / days,
        repeated_per_day=repeated / days,
        runs=runs,
        seconds=seconds,
    )


def _faults(parts: Parts, random: Random) -> Iterator[Fault]:
    """Draw failures without end: exponential gaps, each kind by its share."""
    rate, cases = parts.rate, parts.cases()
    reached = list(accumulate(share for _, share in cases))
    at = 0.0
    while True:
        at -= math.log(1.0 - random.random()) / rate
        number = bisect(reached, random.random() * reached[-1])
        yield Fault(cases[min(number, len(cases) - 1)][0], at)
