"""Rendezvous between real processes: late peers, strangers, other attempts, lost peers."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.liveness import hang
from support.launching import free_ports
from support.patience import PATIENCE

DATA = TensorDataset(torch.ones(24, 4))


def train(steps: int = 3, **options: object) -> ddp.Run:
    run = ddp.start(total_steps=steps, global_batch=6, **options)  # type: ignore[arg-type]
    model = nn.Linear(4, 2)
    wrapped, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(DATA):
        for (x,) in step.batches:
            step.backward(wrapped(x).sum())
        step.commit()
    run.finish()
    return run


def environment(port: int, rank: int, world: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "2", **more,
    }  # fmt: skip


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def program(rank: int) -> None:
    train()


def test_rank_0_may_come_last(gang, port, wait_until):
    def late(rank: int) -> None:
        gang.log_path(rank).with_suffix(".up").touch()
        train()

    for rank in (1, 2):
        gang.spawn(late, rank, environment(port, rank, 3))
    ups = [gang.log_path(rank).with_suffix(".up") for rank in (1, 2)]
    wait_until(lambda: all(up.exists() for up in ups), "ranks 1 and 2 run")
    gang.spawn(program, 0, environment(port, 0, 3))
    assert gang.wait() == {0: 0, 1: 0, 2: 0}


def test_ranks_of_one_launcher_are_linked_and_others_are_not(gang, tmp_path):
    (state := tmp_path / "state").mkdir()
    for local, links in (("1", []), ("2", ["rank-0.link", "rank-1.link"])):
        [meeting] = free_ports(1)
        more = {"LOCAL_WORLD_SIZE": local, "DDPJOB_TRAINER_STATE_DIR": str(state)}
        for rank in (0, 1):
            gang.spawn(program, rank, environment(meeting, rank, 2, **more))
        assert gang.wait() == {0: 0, 1: 0}
        assert sorted(path.name for path in state.glob("*.link")) == links


@pytest.mark.fault("T6")
def test_a_straggler_of_an_earlier_attempt_ends_with_75(gang, port):
    gang.spawn(program, 0, environment(port, 0, 2, DDPJOB_ATTEMPT="3"))
    gang.spawn(program, 1, environment(port, 1, 2, DDPJOB_ATTEMPT="2"))
    assert_code(gang, 1, 75)
    assert "rank 0 belongs to attempt 3 round 0, this process to attempt 2 round 0" in gang.log(1)
    gang.spawn(program, 1, environment(port, 1, 2, DDPJOB_ATTEMPT="3"))
    assert gang.wait() == {0: 0, 1: 0}


@pytest.mark.fault("T6")
def test_a_new_attempt_waits_while_the_old_rank_0_still_answers(gang, port, wait_until):
    gang.spawn(program, 0, environment(port, 0, 2, DDPJOB_ATTEMPT="1"))
    old = gang.pids.pop(0)

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, "the old rank 0 serves its store")
    gang.spawn(program, 1, environment(port, 1, 2, DDPJOB_ATTEMPT="2"))
    gang.spawn(program, 0, environment(port, 0, 2, DDPJOB_ATTEMPT="2"))  # the port is taken
    time.sleep(0.5)  # no condition to wait for: both must keep trying meanwhile
    assert all(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in gang.pids.values())
    os.kill(old, signal.SIGKILL)
    os.waitpid(old, 0)
    assert gang.wait() == {0: 0, 1: 0}


def no_name(*_: object) -> None:
    """Answer at once: the machine's resolver may take longer than the watchdog waits."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("rank", "address", "why"),
    [
        (1, "no-such-name", "does not resolve"),
        (1, "127.0.0.1", "does not answer"),
        (1, "a stranger's", ""),  # accepts and closes: not our store, and no reason to crash
        (0, "127.0.0.1", "2 of 3 ranks are missing: 1, 2"),
    ],
)
def test_who_finds_nobody_gives_up_at_the_startup_deadline(
    gang, port, rank, address, why, monkeypatch
):
    monkeypatch.setattr(hang, "_WAITING_SECONDS", PATIENCE)  # it gives up by itself, however late
    if address == "no-such-name":
        monkeypatch.setattr(socket, "getaddrinfo", no_name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if address == "a stranger's":
            address, port = server.getsockname()
            threading.Thread(target=accepts_and_closes, args=(server,), daemon=True).start()
        where = {"MASTER_ADDR": address, "DDPJOB_HANG_STARTUP_SECONDS": "1"}
        gang.spawn(program, rank, environment(port, rank, 3, **where))
        assert gang.wait() == {rank: 75}
        server.shutdown(socket.SHUT_RDWR)
    assert "gave up after the startup deadline" in gang.log(rank)
    assert why in gang.log(rank)


def accepts_and_closes(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def assert_code(gang, rank: int, code: int) -> None:  # type: ignore[no-untyped-def]
    pid = gang.pids.pop(rank)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code, gang.log(rank)


def test_sigterm_before_the_loop_ends_at_once(gang, wait_until):
    def waits(rank: int) -> None:
        if rank == 1:
            time.sleep(3600)
        ddp.start(total_steps=1, global_batch=6)

    gang.start(waits, env={"DDPJOB_HANG_STARTUP_SECONDS": "300"})
    wait_until(lambda: _handles_sigterm(gang.pids[2]), "rank 2 is in start()")
    os.kill(gang.pids[2], signal.SIGTERM)
    assert_code(gang, 2, 143)
    gang.end()


def _handles_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
        caught = next(line for line in file if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)))
