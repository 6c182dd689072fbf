"""Only the lost pod is replaced: real launchers, of which the test plays the operator.

It kills one by SIGKILL, as a node's end does, or tells it to end, and starts its successor with a
greater attempt. The others keep their processes' launchers, and all ends in the same bits.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.launching import PATHS, free_ports, launch, page
from support.patience import PATIENCE
from support.rounds import Forwarder, Outcome, Training, alive, children, kill

#: Spares are not the point: each launcher would import torch once more for them.
COLD = ("--spares", "0")
#: On one machine each launcher has an address, to which its name leads, as a pod has.
ADDRESSES = """
import os
import re
import socket
from ddpjob_trainer.launcher import sockets

usual_names, usual_bind = socket.getaddrinfo, sockets.bind
own = os.environ.get("DDPJOB_REPLICA")

def getaddrinfo(host, *given, **named):
    found = re.fullmatch(r"j-([0-9]+)[.]j[.]ns[.]svc", str(host))
    return usual_names(f"127.0.1.{int(found[1]) + 1}" if found else host, *given, **named)

def bind(port, *, reuse=True):
    if own is None or str(port) != os.environ.get("DDPJOB_HUB_PORT"):
        return usual_bind(port, reuse=reuse)
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((f"127.0.1.{int(own) + 1}", port))
    return bound

socket.getaddrinfo, sockets.bind = getaddrinfo, bind
"""
HUB = "127.0.1.1"


class Operated(Training):
    """Three pods with a rank each, replica 0 with the hub."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.directory / "site").mkdir()
        (self.directory / "site/sitecustomize.py").write_text(ADDRESSES)
        [self.pages] = free_ports(1)
        self.hub = 1  # its number
        self.attempt_now = 1
        self.gone: list[Any] = []

    def begin(self, **hub_ports: int) -> None:
        """Start all pods. ``hub_ports``: another way to the hub, by replica, as r2=..."""
        self.launchers = [self._pod(one, hub_ports.get(f"r{one}", 0)) for one in range(3)]

    def replace(self, *replicas: int) -> None:
        """Start successors of pods that have ended, as of one attempt of the operator's."""
        self.attempt_now += 1
        if 0 in replicas:
            self.hub = self.attempt_now
        for replica in replicas:
            old = self.launchers[replica]
            old.communicate()
            self.gone.append(old)
            self.launchers[replica] = self._pod(replica)

    def succeed(self, replica: int) -> Any:
        """Start a successor beside a pod that has not ended; return the old launcher."""
        old = self.launchers[replica]
        self.attempt_now += 1
        self.launchers[replica] = self._pod(replica)
        return old

    def release(self, place: str) -> None:
        (self.directory / f"hold-{place}").unlink()

    def lose(self, *replicas: int) -> None:
        kill(*(self.launchers[replica].pid for replica in replicas))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(page(self.pages, "state?uid=uid"))
        return found

    def _pod(self, replica: int, hub_port: int = 0) -> Any:
        env = {
            "PYTHONPATH": f"{self.directory / 'site'}{os.pathsep}{PATHS}",
            "DDPJOB_UID": "uid", "DDPJOB_NAME": "j", "DDPJOB_NAMESPACE": "ns",
            "DDPJOB_ATTEMPT": str(self.attempt_now), "DDPJOB_HUB": str(self.hub),
            "DDPJOB_POD_UID": f"pod-{replica}-{self.attempt_now}", "DDPJOB_REPLICA": str(replica),
            "DDPJOB_REPLACE_SECONDS": "600", "DDPJOB_HUB_PORT": str(hub_port or self.hub_port),
            "DDPJOB_IN_PLACE_MAX_WITHOUT_PROGRESS": "3", "DDPJOB_DRILL": "Never",
            "PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(replica),
            "MASTER_ADDR": HUB, "MASTER_PORT": str(self._port), "WORLD_SIZE": "3",
            "RANK": str(replica), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        if self.attempt_now > 1:
            env["DDPJOB_REPLACEMENT"] = "1"
        if replica == 0:
            env["DDPJOB_METRICS_PORT"] = str(self.pages)
        report = str(self.directory / f"report-{replica}")
        return launch(
            "--termination-log", report, *COLD, str(self.script), str(self.directory),
            env=self._environment(env),
        )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    training.launch(*COLD)
    assert training.codes() == [0], training.errors
    return training.outcome()


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Operated]:
    found = Operated(tmp_path)
    yield found
    found.end()


@pytest.mark.fault("T5")
def test_each_pod_in_turn_is_lost_and_only_it_is_replaced(gang, undisturbed):  # type: ignore[no-untyped-def]
    """In the midst of the second epoch; the pod with the hub comes last.

    The others' workers wait as well, or for the lost one, and notice its end by themselves.
    """
    gang.hold("1-0-step-11", "1-1-step-12-2", "1-2-step-13-0")
    gang.begin()
    first = gang.launchers[:]
    places = {"1-0-step-11": (1, range(3)), "1-1-step-12": (2, [2]), "1-2-step-13": (0, [0])}
    for place, (replica, ranks) in places.items():
        workers = gang.at(place, ranks)
        assert (gang.state()["attempt"], gang.state()["holds"]) == (1, True)
        gang.lose(replica)
        gang.until(lambda pids=workers: not any(map(alive, pids)), "all workers have ended")
        survivors = [one for one in range(3) if one != replica]
        assert all(gang.launchers[one].poll() is None for one in survivors), "they hold"
        gang.replace(replica)
    assert gang.codes() == [0, 0, 0], gang.errors
    assert [one.returncode for one in first] == [-9] * 3, "each was lost once, and nothing else"
    assert gang.outcome() == undisturbed
    assert gang.report()["round"] == 0, "of hub 4"


@pytest.mark.fault("T16")
def test_one_that_is_stopped_comes_back_or_is_turned_away(gang, undisturbed):  # type: ignore[no-untyped-def]
    """Neither closes a connection: only its silence tells."""
    gang.hold("1-0-step-11", "1-1-step-12")
    gang.begin()
    for place, replica in (("1-0-step-11", 1), ("1-1-step-12", 2)):
        gang.at(place)
        old = gang.launchers[replica]
        old.send_signal(signal.SIGSTOP)
        gang.until(lambda one=replica: gang.state().get("away") == [one], "the hub notices")
        if replica == 2:
            gang.succeed(2)
            gang.until(lambda: "away" not in gang.state(), "the new one has its place")
        old.send_signal(signal.SIGCONT)
    _, said = old.communicate(timeout=PATIENCE)
    assert old.returncode == 75, said
    assert "this pod has been replaced by another one" in said
    assert gang.codes() == [0, 0, 0], gang.errors
    assert gang.outcome() == undisturbed
    assert [one["replica"] for one in gang.report()["rounds"]] == [1, 2]


@pytest.mark.tier("all")
@pytest.mark.fault("T5")
def test_more_are_lost_while_the_others_hold(gang, undisturbed):  # type: ignore[no-untyped-def]
    """A newcomer before its first round; the hub and another at once; the new hub, at the end."""
    gang.hold("1-0-step-9", "1-1-step-14", "5-0-end")
    gang.begin()
    gang.at("1-0-step-9")
    gang.lose(1, 2)
    gang.replace(2)
    gang.until(lambda: len(gang.marks("admitted")) == 3, "the newcomer is linked")
    gang.lose(2)
    gang.replace(1)
    gang.replace(2)
    gang.at("1-1-step-14")
    assert [one["kind"] for one in gang.state()["rounds"]] == ["lost"]
    survivor = gang.launchers[1]
    gang.lose(0, 2)
    gang.replace(0, 2)
    gang.at("5-0-end")
    gang.lose(0)
    gang.replace(0)
    assert gang.codes() == [0, 0, 0], gang.errors
    assert gang.launchers[1] is survivor
    assert gang.outcome() == undisturbed


@pytest.mark.tier("all")
@pytest.mark.fault("T5")
def test_one_that_leaves_costs_no_step_and_a_broken_link_no_pod(gang, undisturbed):  # type: ignore[no-untyped-def]
    """Nor ends the job where the others are done when the last is lost."""
    forwarder = Forwarder(gang.hub_port, HUB)
    gang.hold("1-0-step-9", "1-1-step-13", "1-2-end-2")
    gang.begin(r2=forwarder.port)
    gang.at("1-0-step-9")
    gang.launchers[1].send_signal(signal.SIGTERM)
    gang.until(lambda: gang.marks("leaving"), "its worker knows")
    gang.release("1-0-step-9")
    gang.until(lambda: gang.launchers[1].poll() is not None, "it has ended")
    assert gang.launchers[1].returncode == 143
    gang.replace(1)
    gang.at("1-1-step-13")
    [record] = gang.state()["rounds"]
    assert (record["kind"], record["replica"]) == ("lost", 1)
    assert record["snapshotStep"] >= 10, "all saved together"
    forwarder.cut(again=True)
    gang.at("1-2-end", ranks=[2])
    survivors = gang.launchers[:2]
    gang.until(lambda: not any(children(one.pid) for one in survivors), "the others are done")
    gang.lose(2)
    gang.replace(2)
    assert gang.codes() == [0, 0, 0], gang.errors
    assert gang.launchers[:2] == survivors
    assert gang.outcome() == undisturbed
    assert [one["replica"] for one in gang.report()["rounds"]] == [1, 2, 2]


@pytest.mark.tier("all")
@pytest.mark.parametrize("holding", [False, True])
def test_all_pods_of_a_job_that_is_suspended_save_and_end(gang, holding):  # type: ignore[no-untyped-def]
    gang.hold("1-0-step-9")
    gang.begin()
    gang.at("1-0-step-9")
    rest = gang.launchers
    if holding:
        gang.lose(2)
        gang.until(lambda: len(gang.marks("stopped")) == 2, "two hold")
        rest = gang.launchers[:2]
    for launcher in rest:
        launcher.send_signal(signal.SIGTERM)
    gang.until(lambda: len(gang.marks("leaving")) == len(rest), "all know")
    gang.release("1-0-step-9")
    assert gang.codes() == [143, 143, -9 if holding else 143], gang.errors
    assert gang.report(1)["kind"] == "sigterm"
