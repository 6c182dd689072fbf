"""The story under every plan (plans.py): whatever it meets, the right end, and all invariants.

`make test` and `make test-all` play a sample, `make soak` all; each plan has a namespace, a proxy
and an operator process of its own, and some are played side by side. What they found is in
docs/internals/fault-matrix.md.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from api.plans import TRACE, Plan, everything, plan_of, play
from api.story import Play, happenings
from support.cluster import Cluster

SIDE_BY_SIDE = int(os.environ.get("DDPJOB_PLANS_AT_ONCE", "6"))
ALL = everything()


def of(*groups: str) -> pytest.MarkDecorator:
    """A test for all plans of these groups."""
    chosen = [plan for plan in ALL if plan.group in groups]
    return pytest.mark.parametrize("plan", chosen, ids=[plan.id for plan in chosen])


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Plan], Play]]:
    """Begins with all plans that were chosen; a test waits for its own."""
    wanted = [plan for item in request.session.items if (plan := plan_of(item))]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        plays: dict[str, Future[Play]] = {
            plan.id: pool.submit(play, control_plane, tmp_path_factory.mktemp("plan"), plan)
            for plan in wanted
        }
        try:
            yield lambda plan: plays[plan.id].result()
        finally:
            pool.shutdown(cancel_futures=True)


def test_the_learned_trace_is_what_is_played(control_plane, tmp_path):
    found = play(control_plane, tmp_path, None)
    writes = [*dict.fromkeys(one for one in found.seen)]
    learned = {"writes": writes, "events": sorted(set(happenings(found)))}
    if os.environ.get("DDPJOB_LEARN"):
        TRACE.write_text(json.dumps(learned, indent=1) + "\n")
    trace = json.loads(TRACE.read_text())
    assert sorted(trace["writes"]) == sorted(writes)
    assert set(trace["events"]) <= set(learned["events"])


@of("writes")
@pytest.mark.fault("O1", "A1", "A4")
def test_a_fault_at_a_write(played, plan):
    played(plan)


@of("views")
@pytest.mark.fault("O2", "O3")
def test_a_view_that_is_not_true(played, plan):
    played(plan)


@of("pods")
@pytest.mark.fault("N10")
def test_a_pod_that_ends_slowly(played, plan):
    played(plan)


@of("second-operator")
@pytest.mark.fault("O4")
def test_another_operator_acts(played, plan):
    played(plan)


@of("away-20-minutes")
@pytest.mark.fault("A6")
def test_the_api_server_is_away(played, plan):
    played(plan)


@of("token-rotated", "rights")
@pytest.mark.fault("A9")
def test_rights_are_lost_and_given_back(played, plan):
    played(plan)
