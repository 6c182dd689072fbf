"""A stranger at torch's store: what it forges decides nothing."""

import json
import math
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ddpjob_trainer.comm.rendezvous import _Card, _group
from ddpjob_trainer.comm.sealed import data_of
from ddpjob_trainer.environment import (
    KEY_FD,
    KEY_FILE,
    StoreKey,
    read_worker,
    round_secret,
    take_key,
)
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.snapshot.save.parts import PartReports, Report
from support.sealed import OWN, board, seal

WRONG = json.dumps({"rank": 1, "bytes": 9, "crc32": 1, "own": [], "fingerprint": 0, "text": ""})
REAL = [Report(0, 9, 9), Report(1, 9, 9)]


@pytest.fixture
def store() -> TCPStore:
    """That of rank 0."""
    patience = timedelta(seconds=2)  # of get(), which must wait for nothing
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=patience)


@pytest.fixture
def stranger(store: TCPStore) -> Any:
    """Who only reaches the port."""
    return TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)


def keys(store: Any, word: str) -> list[str]:
    return [key for key in store.list_keys() if word in key]


def pretends(stranger: Store) -> None:
    """As in the days when anybody could: the report, and the count."""
    for where in (seal().prefix, OWN.key):
        there: Any = PrefixStore(where, stranger)
        there.set("snapshot/150/1", WRONG)
        there.add("snapshot/150", 2)


def seals_with_another_token(stranger: Store) -> None:
    there: Any = PrefixStore(seal().prefix, stranger)
    there.set("snapshot/150/1", seal("gue55").close("snapshot/150/1", 1, WRONG.encode()))


def says_it_again(stranger: Store) -> None:
    """Reports that were real in another place: another rank's, step's, kind's, round's, run's."""
    there: Any = PrefixStore(seal().prefix, stranger)
    data = WRONG.encode()
    again = [
        seal().close("snapshot/150/1", 0, data),
        seal().close("snapshot/100/1", 1, data),
        seal().close("read-back/150/1", 1, data),
        seal(run=1).close("snapshot/150/1", 1, data),
        seal(own=replace(OWN, round=1)).close("snapshot/150/1", 1, data),
        seal(own=replace(OWN, uid="other")).close("snapshot/150/1", 1, data),
    ]
    reports = PartReports(board(stranger), (1,))
    for note in again:
        there.set("snapshot/150/1", note)
        assert reports.complete(150) is None


def writes_much(stranger: Store) -> None:
    there: Any = PrefixStore(seal().prefix, stranger)
    for _ in range(3):  # of what it sends at once, the store takes 8 MiB
        there.append("snapshot/150/1", "x" * (6 << 20))


@pytest.mark.parametrize("attack", [pretends, seals_with_another_token, says_it_again, writes_much])
@pytest.mark.fault("T19")
def test_a_forged_report_commits_no_snapshot(store, stranger, attack, capsys):
    mine, theirs = PartReports(board(store), (0, 1)), PartReports(board(stranger, 1), (0, 1))
    mine.post(150, REAL[0])
    attack(stranger)
    stranger.num_keys()  # it has its answer, so the store has the rest
    assert mine.complete(150) is None
    assert mine.first_missing(150) == 1
    theirs.post(150, REAL[1])
    assert mine.complete(150) == REAL
    assert capsys.readouterr().err.count("ignored a forged snapshot/150/1 in torch's store") == 1


@pytest.mark.fault("T19")
def test_who_removes_reports_makes_nobody_wait(store, stranger):
    """get() would wait for hours; and no report is lost that was read before."""
    mine, theirs = PartReports(board(store), (0, 1)), PartReports(board(stranger, 1), (0, 1))
    mine.post(150, REAL[0])
    assert mine.complete(150) is None
    for key in keys(stranger, "snapshot"):
        stranger.delete_key(key)
    theirs.post(150, REAL[1])
    assert mine.complete(150) == REAL
    assert not keys(stranger, "snapshot")


def test_the_first_call_that_a_rank_has_written_counts(store, stranger, capsys):
    PrefixStore(seal().prefix, stranger).set("call/3", json.dumps([2, "run.save()"]))
    first, second = board(store), board(stranger, 1)
    assert first.first("call", 3, 0, b"run.steps()") == (0, b"run.steps()")
    assert "ignored a forged call/3 in torch's store" in capsys.readouterr().err
    assert second.first("call", 3, 1, b"run.evaluate()") == (0, b"run.steps()")


def test_no_key_and_no_note_holds_the_jobs_uid(store, stranger):
    card(0).show(store)
    board(store).post("snapshot", 150, 0, b"{}")
    for key in stranger.list_keys():
        assert OWN.uid not in key
        assert OWN.uid.encode() not in stranger.get(key)


# --- The rendezvous ---------------------------------------------------------------------------


def card(rank: int, world: int = 2, attempt: int = OWN.attempt, token: str = "t0ken") -> _Card:
    env = read_worker(
        {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "a", "MASTER_PORT": "1",
            "DDPJOB_UID": OWN.uid, "DDPJOB_ATTEMPT": str(attempt), "DDPJOB_ROUND": "0",
        }
    )  # fmt: skip
    return _Card(env, seal(token, env.identity), 0)


@pytest.mark.parametrize(
    "forged",
    [
        lambda told: json.dumps([OWN.uid, OWN.attempt, 0, 9]),  # as it once was
        lambda told: json.dumps([*told[:4], 9, told[5]]),  # another world size, which is final
        lambda told: json.dumps([told[0], "x", *told[2:]]),
        lambda told: json.dumps([told[0], math.inf, *told[2:]]),
        lambda told: json.dumps([told[0], {}, *told[2:]]),
        lambda told: json.dumps([told[0], 1, *told[2:]]),  # an earlier attempt
        lambda told: "[" * 1000,
        lambda told: "",
        lambda told: "9" * (7 << 20),
    ],
)
@pytest.mark.fault("T19")
def test_a_forged_identity_is_waited_out(store, stranger, forged):
    first, second = card(0), card(1)
    first.show(store)
    told = json.loads(data_of(stranger.get("ddpjob/identity")))
    stranger.set("ddpjob/identity", b"m" * 32 + bytes(4) + forged(told).encode())
    stranger.num_keys()
    assert second.compare(store)
    first.show(store)
    assert second.compare(store) == ""


@pytest.mark.parametrize(
    "text", [b"x" * 10, b"Unable to find address; ncclInvalidUsage", b"\xff" * 170]
)
@pytest.mark.fault("T19")
def test_who_writes_over_gloos_own_keys_is_a_lost_peer(text):
    """Gloo raises ValueError or MemoryError then, which would be charged as the script's."""
    store = HashStore()
    store.set("0//cpu//0/0", text)
    second = timedelta(seconds=1)
    with pytest.raises(PeerLostError):
        _group(store, card(1)._env, torch.device("cpu"), second, second)


@pytest.mark.fault("T19")
def test_a_younger_attempt_ends_a_straggler_and_no_job(store):
    """A stranger may do that by repeating it; so it is no more than a lost peer."""
    card(0, attempt=3).show(store)
    with pytest.raises(PeerLostError, match="attempt 3 round 0, this process to attempt 2"):
        card(1).compare(store)


@pytest.mark.parametrize(("token", "error"), [("t0ken", ConfigError), ("", PeerLostError)])
def test_only_what_nobody_else_can_have_written_ends_a_job_for_good(store, token, error):
    card(0, token=token).show(store)
    with pytest.raises(error, match="WORLD_SIZE is 3 here and 2 at rank 0"):
        card(1, world=3, token=token).compare(store)


# --- The key ----------------------------------------------------------------------------------


def test_the_key_is_taken_out_of_the_environment(tmp_path):
    secret = round_secret("t0ken", OWN.uid, OWN.attempt, OWN.round)
    known = StoreKey(secret[:32], final=True, lineage=secret[32:])
    job = {"DDPJOB_UID": OWN.uid}
    handed = os.memfd_create(KEY_FILE)
    os.write(handed, secret)
    other = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    environments = [
        ({**job, KEY_FD: str(handed)}, known),  # by our launcher
        (job, known),  # a second run of this process
        ({**job, "DDPJOB_TOKEN": "t0ken"}, known),  # by torchrun
    ]
    for env, key in environments:
        assert take_key(env, OWN) == key
        assert env == {}.fromkeys(job, OWN.uid), "no program can log it"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handed)
    assert "t0ken" not in repr(key)
    assert secret.hex() not in repr(key)
    strange = replace(OWN, attempt=5)
    for fd in (str(other), "77", "x", ""):  # handed to torchrun, which does not hand it on
        found = take_key({**job, KEY_FD: fd}, strange)
        assert not found.final
        assert found.secret != secret
    assert take_key({}, replace(OWN, uid="local-none")).final, "there is no job to end"
    os.close(other)
