"""The loop on a device that does its work later, as a GPU does: equal bits, and nothing waits.

The device is a stand-in, see support.queued; three ranks train on it, over gloo.
"""

import ast
import json
import math
import os
import re
import signal
import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.environment import REPLAY_DIR, ROUND_DRILL
from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.snapshot.ondisk import manifest
from support.queued import Queued
from support.snapshots import await_snapshot
from support.stand import ALL_0, Stand
from support.tiers import some_in_gate

STEPS = 12
ALL_70 = dict.fromkeys(range(3), 70)


class Looks(TorchDispatchMode):
    """Counts what would wait for a GPU: a look at a number, or a condition on one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@dataclass(kw_only=True)
class Training(Stand, every=4, total_steps=STEPS, global_batch=48, shards=6, check_every=100):
    prepare: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    bad: int = -1  # index of a step whose loss is NaN on rank 1
    stop: int = -1  # index of a step in which rank 1 gets SIGTERM
    ask: bool = False  # rank 0 alone asks for each step's loss
    kept = MappingProxyType({"staging": "thread"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start = {"logging": ddp.Logging(events=self.directory / "events")} | self.start

    def train(self, run: ddp.Run) -> object:
        model = nn.Sequential(nn.Linear(32, 96), nn.Dropout(0.2), nn.ReLU(), nn.Linear(96, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        wrapped, _ = run.prepare(model, optimizer, bucket_cap_mb=0.01, **self.prepare)
        data = TensorDataset(torch.randn(96, 32), torch.randint(0, 8, (96,)))
        device = accelerator.of(torch.device("cpu"))
        looks: dict[int, int] = {}
        with Looks() as looked:
            for step in run.steps(data):
                looks[step.index] = looked.count
                before = len(device.waits) if isinstance(device, Queued) else 0
                self._step(step, run, wrapped)
                if isinstance(device, Queued):
                    looked.count += len(device.waits) - before
        # Elastic keeps no buckets, which it never uses.
        kept = run.options.level == "resume"
        assert hasattr(wrapped.reducer, "_get_zeros_like_grad_buckets") == kept
        looks = {n: looks[n + 1] - count for n, count in looks.items() if n and n + 1 in looks}
        return [looks, device.waits if isinstance(device, Queued) else []]

    def _step(self, step: Any, run: ddp.Run, wrapped: nn.Module) -> None:
        if run.rank == 1 and step.index == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        for x, y in step.batches:
            loss = nn.functional.cross_entropy(wrapped(x), y)
            if run.rank == 1 and step.index == self.bad:
                loss = loss * math.nan
            step.backward(loss, weight=len(x) if self.weighted else None)
        run.log({"doubled": loss.detach() * 2})
        step.commit()
        if self.ask and run.rank == 0:
            assert math.isfinite(step.loss)
        if step.index and step.index % self.every == 0:
            await_snapshot(max((self.directory / "snapshots").glob("0*")), step.index)
        self.may_die(run, step.index)

    def hashes(self) -> list[list[str]]:
        return [result.split()[:2] for result in self.results()]

    def told(self) -> list[Any]:
        """What the event log holds, but for times."""
        found = []
        for line in (self.directory / "events").read_text().splitlines():
            event = json.loads(line)
            if event["event"] in ("step", "log"):
                values = (event["event"], event["step"], event.get("loss"), event.get("values"))
                found.append(values)
        return found

    def steps(self) -> set[int]:
        return {int(p.stem.split("-")[1]) for p in self.directory.glob("*/*/step-*.json")}


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """From here on ranks train on the stand-in."""

    def use() -> None:
        device = Queued(torch.device("cpu"))
        monkeypatch.setattr(accelerator, "of", lambda _: device)

    return use


@pytest.mark.parametrize("level", some_in_gate(["resume", "elastic"], "resume"))
@pytest.mark.parametrize(
    "changes",
    [{}, {"weighted": True, "prepare": {"clip_grad_norm": 0.5}}, {"prepare": {"ema": 0.9}}],
    ids=["plain", "weighted", "ema"],
)
def test_equal_bits_and_words(gang, tmp_path, queued, level, changes):
    usual = Training(tmp_path / "usual", {"level": level}, **changes)
    assert gang.run(usual) == ALL_0, gang.log(0)
    queued()
    later = Training(tmp_path / "later", {"level": level}, ask=True, **changes)
    assert gang.run(later) == ALL_0, gang.log(0)
    assert later.hashes() == usual.hashes()
    assert later.told() == usual.told()
    assert len(later.told()) == 2 * STEPS


@pytest.mark.parametrize("readings", [1, 2], ids=["alone", "recorded"])
def test_nothing_waits_for_what_has_just_been_queued(gang, tmp_path, queued, readings):
    """``readings`` in each step: of what the ranks exchange, and for the record of steps."""
    queued()
    training = Training(tmp_path / "later")
    training.every = 100
    env = {REPLAY_DIR: str(tmp_path / "replay")} if readings == 2 else {}
    assert gang.run(training, env=env) == ALL_0, gang.log(0)
    for result in training.results():
        looks, waits = ast.literal_eval(result.split(" ", 2)[2])
        assert list(looks.values()) == [0] * (STEPS - 2), looks
        # The first and the last step are waited for; behind all others lies their update and the
        # whole next step: its begin, batch, forward, backward, what was measured, update.
        assert sum(behind < 7 for behind in waits) <= 2 * readings, waits
        assert len(waits) >= readings * (STEPS - 1), "each step was heard"


@pytest.mark.parametrize("level", some_in_gate(["resume", "elastic"], "resume"))
def test_a_kill_and_a_resume(gang, tmp_path, queued, level):
    queued()
    undisturbed = Training(tmp_path / "undisturbed", {"level": level})
    assert gang.run(undisturbed) == ALL_0, gang.log(0)
    disturbed = Training(tmp_path / "disturbed", {"level": level}, die=(2, 6))
    env = {REPLAY_DIR: str(tmp_path / "replay")}
    assert gang.run(disturbed, env=env) == {0: 75, 1: 75, 2: -9}
    disturbed.die = None
    assert gang.run(disturbed, env=env) == ALL_0, gang.log(0)
    assert "resuming after step 4" in gang.log(0)
    assert re.findall("restart proven: steps 5 to [56] again", gang.log(0))
    assert disturbed.hashes() == undisturbed.hashes()
    assert disturbed.told()[-1] == undisturbed.told()[-1]
    if level == "resume":  # what the order of sums was is in the snapshot
        path = next(disturbed.directory.glob("*/*/step-*12.json"))
        layout, _, sums = manifest.read(path).config["buckets"].partition("/")
        assert len(layout) == len(sums) == 16


@pytest.mark.tier("all")
def test_a_drill_leaves_no_step_out_of_the_record(gang, tmp_path, queued):
    queued()
    env = {
        REPLAY_DIR: str(tmp_path / "replay"),
        ROUND_DRILL: f"Always {os.getpid()} {time.monotonic()}",
    }
    training = Training(tmp_path / "drilled")
    assert gang.run(training, env=env) == dict.fromkeys(range(3), 75), gang.log(0)
    env["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert gang.run(training, env=env) == ALL_0, gang.log(0)
    (last,) = re.findall("a drill: all processes end after step ([67]) ", gang.log(0))
    assert f"restart proven: steps 5 to {last} again" in gang.log(0)


@pytest.mark.parametrize("bad", [3, 5, STEPS - 1])
def test_a_loss_that_is_not_finite_ends_all_before_a_snapshot_holds_it(gang, tmp_path, queued, bad):
    """3 is followed by a snapshot, 5 by a step, the last one by nothing."""
    queued()
    training = Training(tmp_path / "bad", bad=bad)
    assert gang.run(training) == ALL_70, gang.log(0)
    for rank in range(3):
        log = gang.log(rank)
        assert f"step {bad}: gradients are not finite; the loss of rank 1 is" in log
        assert "no snapshot was made of it" in log
    assert training.steps() == {step for step in (4, 8, 12) if step <= bad}


def test_skip_asks_before_each_update(gang, tmp_path, queued):
    usual = Training(tmp_path / "usual", {"nan_policy": "skip"}, bad=5)
    assert gang.run(usual) == ALL_0, gang.log(0)
    queued()
    later = Training(tmp_path / "later", {"nan_policy": "skip"}, bad=5)
    assert gang.run(later) == ALL_0, gang.log(0)
    assert later.hashes() == usual.hashes()
    assert gang.log(0).count("The update is skipped, number 1") == 2, "of both runs"


def test_sigterm_ends_in_a_snapshot(gang, tmp_path, queued):
    queued()
    training = Training(tmp_path / "stopped", stop=5)
    codes = gang.run(training)
    assert codes == {0: 75, 1: 128 + signal.SIGTERM, 2: 75}, gang.log(0)
    assert 6 in training.steps()
    training.stop = -1
    assert gang.run(training) == ALL_0, gang.log(0)
    assert "resuming after step 6" in gang.log(0)
