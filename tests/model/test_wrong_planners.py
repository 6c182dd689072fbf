"""The harness itself is tested: planners that are wrong on purpose must be found out.

The undisturbed story finds some; for others it takes a fault at the right place.
"""

import asyncio

import pytest

from model import wrong
from model.faults import Fault, play, reference, singles
from model.operators import Planner
from support.invariants import Violation


@pytest.mark.parametrize(
    ("planner", "name"),
    [
        (wrong.creates_before_the_intent, "i4_intent_first"),
        (wrong.deletes_before_the_intent, "i4_intent_first"),
        (wrong.skips_the_barrier, "i1_barrier"),
        (wrong.counts_every_pod, "i4_one_cause"),
        (wrong.leaves_the_end, "i6_terminal_final"),
        (wrong.deletes_without_grace, "i1_processes"),
        (wrong.gives_up_waiting, "i19_explained"),
    ],
)
def test_the_story_itself_finds_it(loop, planner, name):
    with pytest.raises(Violation) as found:
        reference(loop, planner).must_rest()
    assert found.value.name == name


@pytest.mark.parametrize(
    ("planner", "event", "name"),
    [
        (wrong.believes_its_cache, "old-pods-9", "i4_cause_earned"),
        (wrong.counts_again_after_a_crash, "restart", "i4_cause_earned"),
        (wrong.says_nothing, "no-image", "i19_explained"),
        (wrong.books_twice, "no-image", "i22_booked_once"),
    ],
)
def test_a_fault_finds_it(loop, planner, event, name):
    """Undisturbed these do well: that is why they are found in the field only."""
    reference(loop, planner).must_rest()
    chosen = [fault for fault in singles(reference(loop)) if fault.what == event]
    assert name in {_violation(loop, fault, planner) for fault in chosen}


def _violation(loop: asyncio.AbstractEventLoop, fault: Fault, planner: Planner) -> str | None:
    try:
        play(loop, (fault,), planner)
    except Violation as found:
        return found.name
    return None
