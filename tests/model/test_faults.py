"""The reference trace under every single fault and under pairs of them (faults.py).

A violation names the invariant and the faults, so one story can be played again alone.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ddpjob_contract import crd
from model.faults import EVENTS, SEEN, UNSEEN, Fault, play, reference, singles, story
from model.story import World, job_body
from support import tiers
from support.invariants import Violation, check
from support.objects import attempt, owner, status, uid_of

#: One pair of so many is played in `make test-all`; `make soak` plays all, or its share of them.
THINNED = 4001
#: Of what `make test-all` plays, pairs and each kind of single fault, others play one of so many.
SAMPLED = 4


def broken(loop: asyncio.AbstractEventLoop, stories: Iterable[tuple[Fault, ...]]) -> list[str]:
    """Every story that breaks an invariant, with its faults."""
    found = []
    for one in stories:
        try:
            play(loop, one)
        except Violation as violation:
            found.append(f"{' + '.join(map(str, one))}: {violation}")
            print(found[-1], flush=True)  # a soak may be cut short
    return found


@pytest.fixture(scope="module")
def everything(loop: asyncio.AbstractEventLoop) -> list[Fault]:
    return list(singles(reference(loop)))


@pytest.fixture(scope="module")
def some(everything: list[Fault], pytestconfig: pytest.Config) -> list[Fault]:
    """Single faults, of each kind every SAMPLED-th, but in `make test-all` all."""
    if pytestconfig.getoption("--tier") == tiers.ALL:
        return everything
    met: Counter[str] = Counter()
    chosen = []
    for fault in everything:
        if met[fault.what] % SAMPLED == 0:
            chosen.append(fault)
        met[fault.what] += 1
    return chosen


def test_the_undisturbed_story(loop):
    world = reference(loop)
    world.must_rest()
    found = world.cluster.status("job")
    assert (found["phase"], found["attempt"]) == ("Succeeded", 2)
    assert (found["restarts"]["total"], found["restarts"]["charged"]) == (1, 1)


def test_a_restart_costs_at_most_3_and_2n_writes(loop):
    """From the first write after the loss to the status that says Running again."""
    history = reference(loop).cluster.history
    told = [(status(w.obj).get("attempt"), status(w.obj).get("phase")) for w in history]
    restart = history[told.index((2, "Restarting")) : told.index((2, "Running")) + 1]
    assert len([write for write in restart if write.by]) <= 3 + 2 * 3


@pytest.mark.parametrize("harm", SEEN)
def test_a_fault_at_any_call(loop, some, harm):
    assert broken(loop, [(fault,) for fault in some if fault.what == harm]) == []


@pytest.mark.parametrize("event", EVENTS)
def test_a_fault_at_any_moment(loop, some, event):
    assert broken(loop, [(fault,) for fault in some if fault.what == event]) == []


@pytest.mark.parametrize("harm", UNSEEN)
def test_what_only_the_operator_saw_changes_nothing(loop, some, harm):
    """The same end, the same counts, the same objects made, whichever call it met (I14)."""
    wanted = story(reference(loop))
    differing = {
        str(fault): found
        for fault in some
        if fault.what == harm and (found := story(play(loop, (fault,)))) != wanted
    }
    assert differing == {}


def test_a_job_deleted_unseen_gets_no_pod_beyond_its_last_intent(loop):
    """The pod of the old uid goes with the garbage collector; the new job of the name goes on."""
    world = World(loop, fate=lambda *_: None)
    world.cluster.create(crd.PLURAL, job_body())
    assert world.run(lambda: world.phase() == "Starting")
    old = world.cluster.get(crd.PLURAL, "job")
    goes_on = world.freeze(world.operator, plurals=(crd.PLURAL,))
    EVENTS["job-recreate"](world)
    assert world.run(lambda: any(owner(pod) == uid_of(old) for pod in world.cluster.pods()))
    goes_on()
    world.heal()
    world.must_end()

    made = next(w for w in world.cluster.history if w.plural == "pods")
    assert (owner(made.obj), attempt(made.obj)) == (uid_of(old), 1)
    before = world.cluster.history[: world.cluster.history.index(made)]
    for number, uid in (("2", uid_of(old)), ("1", "uid-of-nobody")):
        meta = {**made.obj["metadata"], "uid": "uid-of-another"}
        meta["labels"] = {**meta["labels"], crd.LABEL_ATTEMPT: number}
        meta["ownerReferences"] = [{**meta["ownerReferences"][0], "uid": uid}]
        with pytest.raises(Violation) as found:
            check([*before, replace(made, obj={**made.obj, "metadata": meta})])
        assert found.value.name in ("i4_intent_first", "i3_service_first")


@pytest.mark.timeout(20)
def test_two_calls_of_one_leader_or_of_two_are_held_up_and_both_go_on(loop):
    pairs = [(Fault(7, "hold"), Fault(11, "hold")), (Fault(9, "hold"), Fault(10, "hold"))]
    assert broken(loop, pairs) == []


@pytest.mark.timeout(0)  # the whole of it takes hours
def test_pairs_of_faults(loop, everything, soak, pytestconfig):
    thinned = THINNED * (1 if pytestconfig.getoption("--tier") == tiers.ALL else SAMPLED)
    first, step = (soak[0] - 1, soak[1]) if soak else (0, thinned)
    pairs = itertools.combinations(everything, 2)
    found = broken(loop, itertools.islice(pairs, first, None, step))
    assert found == []
