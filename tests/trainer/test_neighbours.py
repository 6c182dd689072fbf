"""Pods of this version and of the one before (tests/frozen) meet in one gang.

A tag that moves does so: pods that are replaced have another image than those that stay.
"""

import pytest

from support import frozen, tiers
from support.rounds import COLD, UNHURRIED, patched


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the launcher and the library of the version before."""
    return frozen.unpacked("ddpjob_trainer", tmp_path_factory.mktemp("older"))


@pytest.mark.parametrize("old", tiers.some_in_gate([{0}, {1}], {0}), ids=str)
@pytest.mark.fault("T20")
def test_ranks_of_two_versions_end_and_name_it_and_new_pods_of_one_train(
    training, undisturbed, tmp_path, older, old
):
    """Version 0.1.0 signs nothing in torch's store, so its ranks and later ones cannot train
    together. Launchers can: they end together, uncharged, and all pods come back with one image.
    """
    before = {name.replace("local_round", "supervisor"): at for name, at in UNHURRIED.items()}
    here, there = patched(tmp_path / "0", UNHURRIED), patched(tmp_path / "1", before, older)
    apart = {replica: there if replica in old else here for replica in range(3)}
    job = {"apart": apart, "DDPJOB_TOKEN": "secret", "DDPJOB_HANG_STARTUP_SECONDS": "40"}
    training.attempt(1, *COLD, **job)
    assert training.codes() == [75, 75, 75], training.errors
    named = "all pods of a gang need one image" if 0 in old else "ranks are missing: 1"
    assert named in "".join(training.errors)
    training.attempt(2, *COLD, DDPJOB_TOKEN="secret")
    assert training.codes() == [0, 0, 0], training.errors
    assert training.outcome() == undisturbed
