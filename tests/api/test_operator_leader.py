"""Several operators, one lease or two: who acts, who follows, and how the process ends."""

import secrets
import signal

import pytest

from ddpjob_operator.shell import app
from support.arena import Arena
from support.rest import Object, eventually

#: For one that is to lose its lease, or may: a slow machine takes it away, too.
SHORT = ("--lease-seconds", "5")
#: For one that is to keep it, and looks at it often all the same: each fifth.
BRISK = ("--lease-seconds", "30")


def ends_slowly() -> None:
    """On a slow machine, too, an operator that is told to end gives its lease back."""
    app._RELEASED = 600.0


def lease_path(arena: Arena, name: str = "ddpjob-operator") -> str:
    return arena.path("leases", name, "/apis/coordination.k8s.io/v1")


def holder(arena: Arena) -> str:
    lease: Object = arena.rest.find(lease_path(arena)) or {"spec": {}}
    return str(lease["spec"].get("holderIdentity"))


@pytest.mark.fault("O5")
def test_the_second_stands_by_and_takes_over(arena):
    first = arena.start_operator()
    second = arena.operator(*BRISK, name="op-b").start()
    second.wait_ready()
    eventually("the second stands by", lambda: "standby: " in second.log())
    gang = f"gang-{secrets.token_hex(2)}"
    arena.apply(gang)
    arena.wait_phase(gang, "Running")
    assert holder(arena) == "op-a"
    assert "Started" not in second.log(), "the standby does nothing"
    assert "ddpjob_leader 0.0" in second.probe("/metrics")[1]
    first.kill()
    first.wait()
    # Its lease is long, lest a slow machine end it: nobody need wait for what is left of that.
    arena.rest.merge(lease_path(arena), {"spec": {"leaseDurationSeconds": 1}})
    arena.kubelet.finish(f"{gang}-1", 1, "boom")
    status = arena.wait_phase(gang, "Running", attempt=2)
    assert status["restarts"]["total"] == 1
    assert holder(arena) == "op-b"
    assert "ddpjob_leader 1.0" in second.probe("/metrics")[1]


@pytest.mark.fault("O5")
def test_sigterm_ends_in_order_and_frees_the_lease(arena):
    arena.breaks = ends_slowly
    operator = arena.start_operator()
    gang = f"gang-{secrets.token_hex(2)}"
    arena.apply(gang)
    arena.wait_phase(gang, "Running")
    assert operator.terminate() == 0
    assert holder(arena) == "", operator.log()
    assert "Traceback" not in operator.log()
    second = arena.operator(name="op-b").start()
    second.wait_leading()


@pytest.mark.fault("O4", "O5")
def test_a_leader_paused_past_its_lease_harms_nothing_when_it_goes_on(arena):
    """As a node does that swaps, or a virtual machine that moves: it wakes up as the leader."""
    first = arena.operator(*SHORT).start()
    first.wait_leading()
    second = arena.operator(*BRISK, name="op-b").start()
    second.wait_ready()
    gang = f"gang-{secrets.token_hex(2)}"
    arena.apply(gang, restart={"backoff": {"maxSeconds": 1}})
    arena.wait_phase(gang, "Running")
    first.process.send_signal(signal.SIGSTOP)
    arena.kubelet.finish(f"{gang}-1", 1, "boom")
    arena.wait_phase(gang, "Running", attempt=2)
    assert holder(arena) == "op-b"
    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 1
    assert "lost the lease" in first.log()
    arena.kubelet.finish(f"{gang}-2", 1, "boom")
    status = arena.wait_phase(gang, "Running", attempt=3)
    assert status["restarts"]["total"] == 2
    assert arena.attempts(gang) == [(f"{gang}-{r}", "3") for r in range(3)]
