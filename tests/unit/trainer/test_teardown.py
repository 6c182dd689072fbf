"""How a process leaves its group: NCCL, whose farewell waits for the others, is stood in for."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddpjob_trainer.comm import world as world_module
from ddpjob_trainer.training import run as of_run
from ddpjob_trainer.training.run import Teardown


@pytest.mark.parametrize(
    ("backend", "together"), [("nccl", True), ("nccl", False), ("gloo", False)]
)
def test_who_leaves_alone_does_not_wait_for_what_is_queued(monkeypatch, backend, together):
    done: list[str] = []
    world = SimpleNamespace(abort=lambda: done.append("abort"))
    monkeypatch.setattr(world_module, "_holders", [])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    world_module.leave_group(together=together)
    alone = (backend, together) == ("nccl", False)
    assert done == (["abort", "destroy"] if alone else ["destroy"])


@pytest.fixture
def process() -> Any:
    nothing = SimpleNamespace(
        rank=1, close=lambda **_: None, wait_durable=lambda: None, finished=lambda: None,
        barrier=lambda: None, phase=lambda _: None, during=lambda _: contextlib.nullcontext(),
    )  # fmt: skip
    shutdown = SimpleNamespace(failing=False, peers=lambda _: contextlib.nullcontext())
    return SimpleNamespace(
        mismatch=nothing, snapshots=nothing, progress=nothing, world=nothing, shutdown=shutdown
    )


@pytest.mark.parametrize(
    ("finishes", "failing", "left"),
    [(True, False, [True]), (False, False, [False]), (False, True, [])],
    ids=["finish()", "the script's end", "an exception"],
)
def test_who_has_met_the_others_leaves_with_them(monkeypatch, process, finishes, failing, left):
    """A process that fails ends at once instead, with the code of its exception."""
    found: list[bool] = []
    monkeypatch.setattr(of_run, "leave_group", lambda *, together: found.append(together))
    monkeypatch.setattr(of_run.atexit, "register", lambda _: None)  # type: ignore[attr-defined]
    one = Teardown(process)
    if finishes:
        one.finish(None)
    process.shutdown.failing = failing
    one._at_exit()
    assert found == left
