"""Several operators, one lease or two: who acts, who follows, and how the process ends."""

import secrets
import signal
from datetime import timedelta

import pytest

from ddpjob_operator.core import operators
from ddpjob_operator.shell import app, reconciler
from support.arena import Arena
from support.policy import lease
from support.rest import Object, eventually

#: For one that is to lose its lease, or may: a slow machine takes it away, too.
SHORT = ("--lease-seconds", "5")
#: For one that is to keep it, and looks at it often all the same: each fifth.
BRISK = ("--lease-seconds", "30")


def ends_slowly() -> None:
    """On a slow machine, too, an operator that is told to end gives its lease back."""
    app._RELEASED = 600.0


def believes() -> None:
    """However slow the machine is, the other one's answer comes in time."""
    operators.PATIENCE = timedelta(hours=1)


def newer_and_hasty() -> None:
    """Of another version; nobody is there to answer it, whatever was answered before."""
    reconciler.__version__ = "9.9"
    operators.PATIENCE = operators.AGAIN = timedelta(seconds=1)


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


@pytest.mark.fault("O5")
def test_of_two_leases_one_acts_and_the_other_waits_until_it_is_gone(arena):
    """As of two releases that serve one namespace, and of a move from one to the other."""
    # The policy lets an operator make no Lease but that of its release.
    arena.rest.post(arena.path("leases", group="/apis/coordination.k8s.io/v1"), lease("second"))
    first = arena.start_operator()
    gang = f"gang-{secrets.token_hex(2)}"
    arena.apply(gang, restart={"backoff": {"maxSeconds": 1}})
    arena.wait_phase(gang, "Running")
    arena.breaks = believes
    second = arena.operator("--lease-name", "second", name="op-b").start()
    second.wait_ready()
    second.wait_leading()
    told = arena.wait_condition(gang, "Stalled", "OtherOperator")["message"]
    for name in ("ddpjob-operator", "second"):
        assert f"{arena.namespace}/{name}" in told
    arena.kubelet.finish(f"{gang}-1", 1, "boom")
    status = arena.wait_phase(gang, "Running", attempt=2)
    assert status["operator"]["lease"] == f"{arena.namespace}/ddpjob-operator"
    assert status["restarts"]["total"] == 1
    assert f"{gang}: Restarting" not in second.log()
    first.terminate()
    second.kill()
    second.wait()
    arena.breaks = newer_and_hasty
    third = arena.operator("--lease-name", "second", name="op-b").start()
    third.wait_ready()
    third.wait_leading()
    arena.kubelet.finish(f"{gang}-2", 1, "boom")
    status = arena.wait_phase(gang, "Running", attempt=3)
    assert status["operator"] == {"lease": f"{arena.namespace}/second", "version": "9.9"}
    arena.succeed(gang)
