"""Launchers of this version and of the one before (tests/frozen) train in one gang.

A tag that moves does so: pods that are replaced have another image than those that stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import frozen, tiers
from support.launching import PATHS
from support.operated import Operated
from support.rounds import COLD, UNHURRIED, Training, alive, kill, patched

#: Of a gang in which not every pod knows the job's secret: what tells so, in a log or report.
UNEVEN = re.compile(r"\b(secret|token|key)\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the launcher and the library of the version before."""
    return frozen.unpacked("ddpjob_trainer", tmp_path_factory.mktemp("older"))


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path)
    yield found
    found.end()


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Operated]:
    found = Operated(tmp_path)
    yield found
    found.end()


@pytest.mark.parametrize("old", tiers.some_in_gate([{0}, {1}], {0}), ids=str)
@pytest.mark.fault("T20")
def test_a_killed_process_comes_back_in_place_beside_the_version_before(  # type: ignore[no-untyped-def]
    training, undisturbed, tmp_path, older, old
):
    """The one before is the hub, or follows it. All know the job's secret, as in pods."""
    here, there = (patched(tmp_path, UNHURRIED, paths) for paths in (PATHS, older))
    training.hold("1-0-step-9", "1-1-step-13")
    apart = {replica: there if replica in old else here for replica in range(3)}
    training.attempt(1, *COLD, apart=apart, DDPJOB_TOKEN="secret")
    versions_are(training, old, older)
    kill(training.at("1-0-step-9")[1])
    kill(training.at("1-1-step-13")[0])
    assert training.codes() == [0, 0, 0], training.errors
    assert training.outcome() == undisturbed
    rounds = [(one["round"], one["rank"]) for one in training.report()["rounds"]]
    assert rounds == [(0, 1), (1, 0)]


def versions_are(training: Training, old: set[int], older: str) -> None:
    """Each rank runs the library of its launcher, so the test is of what it says it is."""
    for replica, rank in enumerate(training.at("1-0-step-9")):
        found = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
        paths = next(one for one in found if one.startswith(b"PYTHONPATH="))
        assert (older.encode() in paths) == (replica in old)


@pytest.mark.tier("all")
@pytest.mark.parametrize(("without", "old"), [(0, set()), (1, set()), (0, {1})], ids=str)
@pytest.mark.fault("T20")
def test_a_pod_without_the_jobs_secret_trains_with_the_others_or_is_named(  # type: ignore[no-untyped-def]
    training, undisturbed, tmp_path, older, without, old
):
    """As one that was made before its job had one; nobody hangs for it."""
    here, there = (patched(tmp_path, UNHURRIED, paths) for paths in (PATHS, older))
    training.hold("1-0-step-9")
    apart = {replica: dict(there if replica in old else here) for replica in range(3)}
    for replica in {0, 1, 2} - {without}:
        apart[replica]["DDPJOB_TOKEN"] = "secret"
    launchers = training.attempt(1, *COLD, apart=apart)
    trains = training.directory / "at-1-0-step-9-2"
    training.until(lambda: trains.exists() or launchers[2].poll() is not None, "step 9, or an end")
    (training.directory / "hold-1-0-step-9").unlink()
    if any(training.codes()):
        assert UNEVEN.search("".join(training.errors)), training.errors
    else:
        assert training.outcome() == undisturbed


@pytest.mark.tier("all")
@pytest.mark.parametrize("first", ["older", "newer"])
@pytest.mark.fault("T20")
def test_pods_are_replaced_by_those_of_the_other_version(gang, undisturbed, older, first):  # type: ignore[no-untyped-def]
    """One after the other, the pod with the hub last: so it is upgraded, or rolled back."""
    paths = {"older": older, "newer": PATHS}
    gang.paths = dict.fromkeys(range(3), paths.pop(first))
    [other] = paths.values()
    gang.hold("1-0-step-11", "1-1-step-12-2", "1-2-step-13-0")
    gang.begin()
    places = {"1-0-step-11": (1, range(3)), "1-1-step-12": (2, [2]), "1-2-step-13": (0, [0])}
    for place, (replica, ranks) in places.items():
        workers = gang.at(place, ranks)
        gang.lose(replica)
        gang.until(lambda pids=workers: not any(map(alive, pids)), "all workers have ended")
        gang.paths[replica] = other
        gang.replace(replica)
    assert gang.codes() == [0, 0, 0], gang.errors
    assert [one.returncode for one in gang.gone] == [-9] * 3, "each was lost once"
    assert gang.outcome() == undisturbed
