"""Rounds under fire: whoever is killed whenever, a documented end, no hang, the same bits.

Either the processes come back in place, or every launcher ends with its documented exit code and a
new attempt goes on. Both must end in the hashes and losses of a run that nothing disturbed.
"""

import contextlib
import itertools
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from ddpjob_trainer.snapshot import reader
from ddpjob_trainer.snapshot.reader import find
from devcluster import process
from support.patience import PATIENCE
from support.rounds import (
    COLD,
    UNHURRIED,
    Forwarder,
    alive,
    children,
    kill,
    patched,
    two_launchers,
)

SPARE = "ddpjob_trainer.launcher.processes.fork_server"


# --- One launcher ----------------------------------------------------------------------------


@pytest.mark.fault("T2")
def test_two_at_once_then_a_kill_at_each_stage_of_the_restart(training, undisturbed, tmp_path):
    places = ["1-0-step-9", "1-1-import", "1-2-start", "1-3-build", "1-4-step-8", "1-5-end"]
    victims = [(0, 1), (0,), (1,), (2,), (0, 1, 2), (2,)]
    training.hold(*places)
    training.launch("--max-rounds-without-progress", "6", **patched(tmp_path, UNHURRIED))
    for place, ranks in zip(places, victims, strict=True):
        pids = training.at(place, ranks=range(3))
        kill(*(pids[rank] for rank in ranks))
    assert training.codes() == [0], training.errors
    assert training.outcome() == undisturbed
    rounds = training.report()["rounds"]
    assert [one["round"] for one in rounds] == list(range(6))
    for one, ranks in zip(rounds, victims, strict=True):
        assert one["rank"] in ranks
        assert one["signal"] == signal.SIGKILL


@pytest.mark.tier("all")
@pytest.mark.fault("T2")
def test_spares_and_their_fork_server_under_fire(training, undisturbed, tmp_path):
    training.hold("1-0-step-9", "1-1-step-9", "1-3-step-9")
    patient = patched(tmp_path, {"launcher.processes.spares._ANSWER_SECONDS": 40})
    launcher = training.launch("--max-rounds-without-progress", "9", **patient)
    first = training.at("1-0-step-9")
    training.until(lambda: training.marks("spares"), "spares")
    server, *spares = sorted(spared(launcher.pid, first), key=started)
    assert len(spares) == 3

    kill(spares[1])  # it is replaced
    training.until(lambda: len(training.marks("spares")) == 2, "a new spare")
    warm = spared(launcher.pid, first) - {server}
    assert spares[1] not in warm
    assert len(warm) == 3
    kill(first[0])
    second = training.at("1-1-step-9")
    assert set(second) == warm, "the workers are the spares"

    # One that is stopped cannot answer the call, so after a while it counts as one that died.
    training.until(lambda: len(training.marks("spares")) == 3, "the next spares")
    kill(max(spared(launcher.pid, second) - {server}), signum=signal.SIGSTOP)
    kill(second[1])
    third = training.at("1-3-step-9")

    training.until(lambda: len(training.marks("spares")) >= 4, "the next spares")
    kill(server, *(spared(launcher.pid, third) - {server}))  # nothing is left to start from
    kill(third[2])
    assert training.codes() == [0], training.errors
    assert training.outcome() == undisturbed
    rounds = [one["rank"] for one in training.report()["rounds"]]
    assert (rounds[:2], len(rounds), rounds[3]) == ([0, 1], 4, 2)


def spared(launcher: int, workers: list[int]) -> set[int]:
    """The fork server and its spares."""
    found = children(launcher)
    return {pid for pid, line in found.items() if SPARE in line and pid not in workers}


def started(pid: int) -> int:
    """When, in ticks; pids begin anew at the end of their range."""
    return process.parse_stat(Path(f"/proc/{pid}/stat").read_text())[1]


# --- Three launchers -------------------------------------------------------------------------


@pytest.mark.fault("T19")
def test_a_stranger_at_the_store_forges_all_it_can_and_changes_nothing(training, undisturbed):
    """During the rendezvous, while rank 2 is late, and in step 9, before two snapshots."""
    uid = "5c1ed0c2-9a"
    training.hold("1-0-import-2", "1-0-step-9")
    training.attempt(1, *COLD, DDPJOB_UID=uid, DDPJOB_TOKEN="t0ken", DDPJOB_DRILL="Never")
    store: Any = None

    def waiting() -> list[str]:
        """Where ranks 0 and 1 have said that they are here: what the names begin with."""
        nonlocal store
        with contextlib.suppress(RuntimeError):
            store = store or TCPStore("127.0.0.1", training.port, wait_for_workers=False)
            names = {name.partition("/here/") for name in store.list_keys()}
            return [begin for begin, here, _ in names if here] if len(names) > 2 else []
        return []

    training.until(waiting, "ranks 0 and 1 wait for rank 2")
    places = {waiting()[0], f"{uid}/1/0"}
    for place, name in itertools.product(places, ("all-here", "all-here/0/0")):
        store.set(f"{place}/{name}", "rank 1 trains on cpu and rank 0 on cuda: give all GPUs")
    (training.directory / "hold-1-0-import-2").unlink()
    training.at("1-0-step-9")
    for place, step, rank in itertools.product(places, (12, 16), range(3)):
        report = {"rank": rank, "bytes": 1, "crc32": 1, "own": [], "fingerprint": 0}
        store.set(f"{place}/snapshot/{step}/{rank}", json.dumps({**report, "text": "no space"}))
        store.add(f"{place}/snapshot/{step}", 3)
    for name in store.list_keys():
        if uid in name or uid.encode() in store.compare_set(name, "-", "-"):
            assert name.startswith(uid), f"{name} tells the uid"  # else we have written it
    (training.directory / "hold-1-0-step-9").unlink()
    assert training.codes() == [0, 0, 0], training.errors
    assert training.outcome() == undisturbed
    root = training.directory / "snapshots"
    assert reader.verify(root) == 0
    assert [found.step for found in find(root)][-2:] == [12, 16]
    told = "".join(training.errors)
    assert told.count("ignored a forged all-here/0/0 in torch's store") >= 1
    assert "no space" not in told


@pytest.mark.fault("T5")
def test_a_lost_launcher_ends_the_attempt_and_the_next_goes_on(training, undisturbed):
    forwarder = Forwarder(training.hub_port)

    def attempt(number: int) -> list[int]:
        training.hold(f"{number}-0-step-{8 + number}")
        training.attempt(number, *COLD, hub_ports={2: forwarder.port})
        return training.at(f"{number}-0-step-{8 + number}")

    def ended(workers: list[int], codes: list[int]) -> None:
        assert training.codes() == codes, training.errors
        for replica, code in enumerate(codes):
            if code == 75:
                assert training.report(replica)["kind"] == "peerLost"
        training.until(lambda: not any(map(alive, workers)), "the workers are gone")

    workers = attempt(1)
    training.launchers[1].kill()
    ended(workers, [75, -9, 75])
    workers = attempt(2)
    training.launchers[0].kill()  # and with it the hub
    ended(workers, [-9, 75, 75])
    workers = attempt(3)
    forwarder.cut()
    ended(workers, [75, 75, 75])
    training.attempt(4, *COLD)
    assert training.codes() == [0, 0, 0], training.errors
    assert training.outcome() == undisturbed


@pytest.mark.fault("T1")
def test_no_rank_goes_on_alone_from_what_its_own_pod_holds(script, tmp_path):
    (tmp_path / "files").mkdir()
    Path(script(
        f"""
found = os.path.exists("checkpoint")
open("checkpoint", "w").close()
with open({str(tmp_path)!r} + f"/told-{{rank}}", "a") as told:
    told.write(f"{{os.environ['DDPJOB_ROUND']}} {{found}}\\n")
if os.environ["DDPJOB_ROUND"] == "0":
    sys.exit(9) if rank == 1 else time.sleep(600)
"""
    )).rename(tmp_path / "files/train.py")  # fmt: skip
    words = (*COLD, "--files", str(tmp_path / "files"), "--anew", "train.py")
    with two_launchers(tmp_path, *words, apart=True) as launchers:
        ends = [(one.communicate(timeout=PATIENCE)[1], one.returncode) for one in launchers]
    assert [code for _, code in ends] == [0, 0], ends
    for rank in range(2):
        # Rank 1 may end before rank 0 has begun.
        told = (tmp_path / f"told-{rank}").read_text().splitlines()
        assert "1 False" in told, told
        assert not any("True" in one for one in told), told


@pytest.mark.fault("T5")
def test_a_hub_that_does_not_answer_is_not_waited_for(script, tmp_path, wait_until):
    """Nor hides it the cause; and the processes that still run here are ended."""
    program = script(
        f"""
Path = __import__("pathlib").Path
(Path({str(tmp_path)!r}) / f"here-{{rank}}").touch()
while not (Path({str(tmp_path)!r}) / "go").exists():
    time.sleep(0.01)
if rank == 2: sys.exit(2)
time.sleep(3600)
"""
    )
    env = patched(tmp_path, {"launcher.local_round._ANSWER_SECONDS": 1.0})
    with two_launchers(tmp_path, program, nproc=2, **env) as (hub, other):
        wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 4, "all four run")
        hub.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        _, err = other.communicate(timeout=PATIENCE)
    assert other.returncode == 2, err
    assert "no further round: the hub was lost: it does not answer" in err
    assert json.loads((tmp_path / "report-1").read_bytes())["rank"] == 2


@pytest.mark.parametrize("taken", [False, True])
def test_the_hub_stays_until_all_others_are_done(script, tmp_path, taken):
    """Where its port is another's there is none, and nobody waits for long."""
    with socket.create_server(("", 0)) as other:
        hub = other.getsockname()[1] if taken else 0
        env = patched(tmp_path, {"launcher.local_round._SUCCESS_SECONDS": 0.2})
        program = script("time.sleep(1.5 * rank)")
        with two_launchers(tmp_path, program, nproc=2, hub=hub, **env) as launchers:
            errors = [launcher.communicate(timeout=PATIENCE)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors
    assert (f"no restart in place: port {hub} of the hub: Address already" in errors[0]) is taken
