"""The plans themselves are tested: operators that are wrong on purpose must be found out.

Some break at once; others do well until the one plan comes that they cannot stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from api import wrong
from api.plans import everything, play
from api.story import Play
from support.cluster import Cluster

pytestmark = pytest.mark.tier("all")

#: Operator, plan ("" for none), what says that it is wrong.
FOUND_OUT = [
    (wrong.creates_before_the_intent, "", "i4_intent_first"),
    (wrong.deletes_before_the_intent, "", "i4_intent_first"),
    (wrong.leaves_the_end, "", "i6_terminal_final"),
    (wrong.skips_the_barrier, "pod-2-of-1-leaving/slow-to-end", "i1_barrier"),
    (wrong.counts_again_after_a_crash, "status-restarting-2/crash-after-commit", "i4_cause_earned"),
    (wrong.believes_its_cache, "status-running-2/restart-old-pods-9", "i4_cause_earned"),
    (wrong.deletes_by_name, "delete-pod-0-of-1/arrives-late", "i4_intent_first"),
]
#: These do well as long as nothing happens: that is why such are found in the field only. What
#: skips the barrier or believes its cache does well by luck, which a busy machine takes away.
FAIR_WEATHER = (wrong.counts_again_after_a_crash, wrong.deletes_by_name)

Ends = Callable[[Callable[[], None], str], BaseException | None]


@pytest.fixture(scope="module")
def ends(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    """How a play of a wrong operator ended; all are played side by side."""
    plans = {plan.id: plan for plan in everything()}
    wanted = [(breaks, plan) for breaks, plan, _ in FOUND_OUT] + [(one, "") for one in FAIR_WEATHER]
    with ThreadPoolExecutor(4) as pool:
        plays: dict[tuple[Callable[[], None], str], Future[Play]] = {
            (breaks, plan): pool.submit(
                play, control_plane, tmp_path_factory.mktemp("wrong"), plans.get(plan), breaks
            )
            for breaks, plan in wanted
        }
        try:
            yield lambda breaks, plan: plays[breaks, plan].exception()
        finally:
            pool.shutdown(cancel_futures=True)


def _id(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("breaks", "plan", "said"), FOUND_OUT, ids=_id)
def test_a_plan_finds_it(ends: Ends, breaks: Callable[[], None], plan: str, said: str) -> None:
    found = ends(breaks, plan)
    assert found is not None, "it was not found out"
    assert said in str(found).splitlines()[0]


@pytest.mark.parametrize("breaks", FAIR_WEATHER)
def test_undisturbed_it_does_well(ends: Ends, breaks: Callable[[], None]) -> None:
    assert ends(breaks, "") is None
