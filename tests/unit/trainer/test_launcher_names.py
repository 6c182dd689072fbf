"""A launcher tells that rank 0's name does not resolve: in its log, and of a hang as its cause."""

import socket
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob_contract.exits import kind_of
from ddpjob_trainer.launcher import hangs
from ddpjob_trainer.launcher.hangs import HangResponse, Names
from ddpjob_trainer.liveness.hang import Deadlines, Hang, Sign
from ddpjob_trainer.liveness.heartbeat import RankState
from support.patience import PATIENCE
from support.worker_group import NEVER, make_group

MASTER = "job-0.job.ns.svc"


class Resolver:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.asked = False, threading.Event()
        monkeypatch.setattr(hangs.socket, "getaddrinfo", self)
        monkeypatch.setattr(hangs, "_PAUSE_SECONDS", 0.001)
        monkeypatch.setattr(hangs, "_QUIET_TRIES", 5)

    def __call__(self, *_: object, **__: object) -> list[object]:
        self.asked.set()
        if not self.there:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    return Resolver(monkeypatch)


@pytest.mark.fault("T11")
def test_a_name_that_does_not_resolve_is_told_once_a_round(resolver):
    alone = Names(None, lambda line: None)
    alone.begin()
    assert (alone.trouble, resolver.asked.is_set()) == ("", False), "nobody is asked"
    said: list[str] = []
    told = threading.Event()
    found = Names(MASTER, lambda line: (said.append(line), told.set())[0])
    for _ in range(2):
        told.clear()
        found.begin()
        assert told.wait(PATIENCE)
        for _ in range(2):  # with the second the first that follows has had its say
            resolver.asked.clear()
            assert resolver.asked.wait(PATIENCE)
        assert found.trouble == (
            f"{MASTER} does not resolve (Name or service not known): is the job's Service there?"
        )
    assert said == [f"workers cannot find one another: {found.trouble}"] * 2
    assert found.lasting == found.trouble
    assert kind_of("hang", found.trouble) == "unresolved"
    resolver.there = True
    resolver.asked.clear()
    found.begin()
    assert resolver.asked.wait(PATIENCE)
    assert (found.trouble, found.lasting) == ("", "")


@pytest.mark.fault("T11")
def test_a_process_that_fails_meanwhile_has_it_as_its_cause(tmp_path):
    """Torch tells of a socket that has timed out, and nothing of the name."""
    words = f"{MASTER} does not resolve (no such name)"
    found = ["", words]
    workers, _ = make_group(tmp_path, unresolved=lambda: found.pop(0))
    for local_rank in range(2):
        workers.ended(NEVER + local_rank, 1, 1.0)
    assert [one.exception for one in workers.exits] == ["", words]


@pytest.mark.fault("T11")
@pytest.mark.parametrize(("phase", "named"), [("startup", True), ("step", False)])
def test_a_hang_at_the_start_names_it_as_its_cause(phase, named):
    hang = Hang(Sign(RankState(1, phase, activity="rendezvous"), 601.0), 600.0)
    request: Any = SimpleNamespace(text=str, native=SimpleNamespace(text=str), brief=list)
    told: list[str] = []
    workers: Any = SimpleNamespace(
        stopping=False, mark_hung=lambda rank, why, lines, now: told.append(why)
    )
    log: Any = SimpleNamespace(put=lambda stream, data: None)
    found: Any = SimpleNamespace(trouble="no such name", begin=lambda: None)
    response = HangResponse(Deadlines(1, 1, 1), Counter(), log, found, starts=False)
    response._hang = hang
    response._answered(workers, request, 1.0)
    assert [why.startswith("Hang: no such name; rank 1 hangs") for why in told] == [named]
