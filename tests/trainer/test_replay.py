"""Each restart is checked: the steps after the snapshot are done again and must be the same.

Three ranks, several buckets; the kill comes in the midst of the second epoch or later. Of what a
script and its dataset keep where no snapshot sees it docs/guides/determinism.md has a table; an
average's counter and early stopping, which act on no loss, are in test_chaos.py.
"""

import argparse
import json
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import ddpjob_trainer as ddp
from ddpjob_trainer.environment import REPLAY_DIR, ROUND_DRILL
from ddpjob_trainer.gradients import determinism
from support.launching import free_ports, page
from support.rounds import Training, kill
from support.snapshots import await_snapshot
from support.tiers import some_in_gate

SAMPLES, GLOBAL_BATCH = 100, 24  # 4 steps in an epoch
STEPS, EVERY = 20, 6
KILLED, SNAPSHOT = 15, 12  # at the step of this index; durable before
PROVEN = f"restart proven: steps {SNAPSHOT + 1} to "


def features(samples: int) -> torch.Tensor:
    return torch.randn(samples, 12, generator=torch.Generator().manual_seed(1))


DATA = TensorDataset(features(SAMPLES), torch.arange(SAMPLES) % 5)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ["RANK"])
        return iter([(x, y) for x, y in DATA][rank::3] * 40)


class Rows(Dataset[Any]):
    """A class of the script's own."""

    generators: Sequence[Any] | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


class Mosaic(Rows):
    """Mixes into each sample the ones before."""

    def __init__(self) -> None:
        self.buffer = deque[torch.Tensor](maxlen=4)

    def __getitem__(self, index: int) -> Any:
        x, y = DATA[index]
        self.buffer.append(x)
        return torch.stack([*self.buffer]).mean(0), y


class Hidden(Rows):
    """Draws from a generator in a list that is as long as one of samples."""

    def __init__(self) -> None:
        self.table = [torch.Generator() for _ in range(SAMPLES + 1)]

    def __getitem__(self, index: int) -> Any:
        x, y = DATA[index]
        return x + torch.rand(1, generator=self.table[0]), y


class Named(Hidden):
    """The cure."""

    @property
    def generators(self) -> Sequence[Any]:  # type: ignore[override]
        return self.table[:1]


class Counting(nn.Sequential):
    """Counts its forwards in a plain attribute, and scales what it returns by it."""

    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = super().forward(x) * (1 + 0.01 * self.seen)
        return result


class Remembering(nn.Sequential):
    """Keeps a running mean in a buffer that is in no state_dict(), and computes with it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.register_buffer("mean", torch.zeros(12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        result: torch.Tensor = super().forward(x - self.mean)
        return result


def plain(run: ddp.Run) -> Callable[[], torch.Tensor | float]:
    """Return what scales a loss: what a script keeps beside its model."""
    return lambda: 1.0


def falling(state: Any) -> Callable[[], float]:
    def scale() -> float:
        state.tau *= 0.97
        return float(state.tau)

    return scale


def args(run: ddp.Run) -> Callable[[], float]:
    return falling(argparse.Namespace(tau=1.0))


def kept(run: ddp.Run) -> Callable[[], float]:
    """The cure."""
    return falling(run.state(tau=1.0))


def drawing(run: ddp.Run) -> Callable[[], torch.Tensor]:
    """Draw from a global generator by what it keeps: the first draw of all changes dropout."""
    drawn: list[bool] = []

    def scale() -> torch.Tensor:
        if not drawn:
            torch.rand(1)
            drawn.append(True)
        return 1 + torch.rand(1)[0]

    return scale


def network(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(3)
    return kind(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 5))


def train(
    directory: Path,
    make: Callable[..., Any] = plain,
    *,
    die: dict[int, int] | None = None,
    model_kind: type[nn.Sequential] = nn.Sequential,
    dataset: Any = DATA,
    several: bool = False,
    workers: int | None = None,
    level: str | None = None,
    wait: bool = False,
) -> Callable[[int], None]:
    """``die``: ranks and the index of the step in which they kill themselves.

    ``wait``: for the first snapshot to be durable, a step after it.
    """

    def program(rank: int) -> None:
        run = ddp.start(
            total_steps=STEPS, global_batch=GLOBAL_BATCH, level=level, seed=4,
            snapshots=ddp.Snapshots(directory=directory / "s", every=EVERY),
        )  # fmt: skip
        nets = [network(model_kind), network()][: 1 + several]
        optimizers = [torch.optim.AdamW(net.parameters(), 0.01) for net in nets]
        models, _ = run.prepare(nets, optimizers, bucket_cap_mb=0.005)
        scale = make(run)
        generators = getattr(dataset, "generators", None)
        for step in run.steps(dataset, workers=workers, generators=generators):
            for x, y in step.batches:
                out = sum(model(x) for model in models)
                step.backward(cross_entropy(out, y) * scale())
            if level is None and not several:
                assert len(determinism.buckets(models[0])) > 1
            if (die or {}).get(rank) == step.index:
                await_snapshot(max((directory / "s").glob("0*")), SNAPSHOT)
                os.kill(os.getpid(), signal.SIGKILL)
            if wait and step.index == EVERY + 1:
                await_snapshot(max((directory / "s").glob("0*")), EVERY)
            step.commit()
        (directory / f"result-{rank}").write_text(f"{run.weights_sha256()} {run.state_sha256()}")
        run.finish()

    return program


@pytest.fixture
def restarted(gang, tmp_path):  # type: ignore[no-untyped-def]
    """Return what rank 0 says after a kill. ``then``: of later lives; options of train()."""

    def run(make: Any = plain, *, world: int = 3, victims: Any = None, **options: Any) -> str:
        env = {REPLAY_DIR: str(tmp_path / "replay")}
        victims = victims or {world - 1: KILLED}
        codes = gang.run(train(tmp_path, make, die=victims, **options), world=world, env=env)
        assert [codes[rank] for rank in victims] == [-signal.SIGKILL] * len(victims), codes
        gang.log_path(0).unlink()
        codes = gang.run(train(tmp_path, make, **options), world=world, env=env)
        assert codes == dict.fromkeys(range(world), 0), gang.last_words()
        told: str = gang.log(0)
        assert f"resuming after step {SNAPSHOT}" in told
        return told

    return run


@pytest.mark.fault("T1")
def test_a_buffer_that_is_not_persistent_is_shared_and_kept(restarted, gang, tmp_path):
    """As plain DDP shares it; so a restart changes no bit."""
    assert PROVEN in restarted(model_kind=Remembering)
    (calm := tmp_path / "calm").mkdir()
    assert gang.run(train(calm, model_kind=Remembering)) == dict.fromkeys(range(3), 0)
    for rank in range(3):
        name = f"result-{rank}"
        assert (calm / name).read_text() == (tmp_path / name).read_text()


def differing(told: str) -> tuple[int, int, str]:
    """Step, rank and what differs, as told once."""
    ((step, rank, what),) = re.findall(
        r"restart not proven: step (\d+), done again .* on rank (\d) in its ([a-z ]+)[,.]", told
    )
    assert PROVEN not in told
    assert "run.register(name, " in told
    return int(step), int(rank), what


def named(case: Any) -> str:
    """The class, and what differs from the usual script."""
    make, options, *_ = case
    shown = {key: options[key] for key in ("level", "world") if key in options}
    if "dataset" in options:
        shown["dataset"] = type(options["dataset"]).__name__
    return "-".join(
        [make.__name__, *(f"{key}-{shown.get(key, '')}".rstrip("-") for key in options)]
    )


CLEAN = [
    (plain, {}), (kept, {}), (plain, {"workers": 2}), (plain, {"dataset": Stream()}),
    (plain, {"several": True}), (plain, {"level": "elastic"}), (plain, {"world": 1}),
    (plain, {"victims": {0: KILLED, 1: KILLED}}), (plain, {"dataset": Named()}),
]  # fmt: skip


@pytest.mark.fault("T1")
@pytest.mark.parametrize("case", some_in_gate(CLEAN, CLEAN[0]), ids=named)
def test_a_clean_script_is_proven(restarted, tmp_path, case):
    make, options = case
    told = restarted(make, **options)
    assert re.findall("restart.*", told) == [f"{PROVEN}{KILLED} again, bit for bit"]
    assert list((tmp_path / "replay").iterdir()) == []


HIDDEN = [
    (args, {}, "loss"), (args, {"several": True}, "loss"), (args, {"world": 1}, "loss"),
    (args, {"level": "elastic", "world": 4}, "loss"), (plain, {"model_kind": Counting}, "loss"),
    (drawing, {}, "random numbers"),
    *((plain, {"dataset": kind()}, "batch") for kind in (Mosaic, Hidden)),
]  # fmt: skip


@pytest.mark.fault("T14")
@pytest.mark.parametrize("case", some_in_gate(HIDDEN, HIDDEN[0]), ids=named)
def test_what_a_script_keeps_is_named(restarted, case):
    make, options, what = case
    told = restarted(make, **options)
    assert differing(told) == (SNAPSHOT + 1, 0, what)
    for cure in ("Compute it from the sample's index or the epoch", "generators=[...])"):
        assert (cure in told) == (what == "batch")


@pytest.mark.fault("T14")
def test_a_drill_finds_it_without_a_kill(gang, tmp_path):
    env = {REPLAY_DIR: str(tmp_path / "replay")}
    drill = {ROUND_DRILL: f"Always {os.getpid()} {time.monotonic()}"}
    codes = gang.run(train(tmp_path, args, wait=True), env=env | drill)
    assert set(codes.values()) == {75}, gang.last_words()
    assert "a drill: all processes end after step" in gang.log(0)
    assert "restart" not in gang.log(0)
    codes = gang.run(train(tmp_path, args), env=env | drill | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert codes == dict.fromkeys(range(3), 0), gang.last_words()
    step, rank, what = differing(gang.log(0))
    assert (step % EVERY, rank, what) == (1, 0, "loss")


@pytest.mark.fault("T1")
def test_a_fault_that_all_resumed_processes_share_is_never_proven(gang, tmp_path):
    """Whoever begins at step 0 trains otherwise than all who resume, which agree."""

    def program(die: int, rank: int) -> None:
        snapshots = ddp.Snapshots(directory=tmp_path / "s", every=3)
        run = ddp.start(total_steps=16, global_batch=6, snapshots=snapshots)
        net = nn.Linear(12, 2)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        factor = 1.0
        for step in run.steps(features(SAMPLES)):
            factor = 2.0 if step.index == 0 else factor
            for x in step.batches:
                step.backward(model(x).pow(2).mean() * factor)
            step.commit()
            if step.index == die:
                await_snapshot(max((tmp_path / "s").glob("0*")), die // 3 * 3)
                os._exit(9)

    env = {REPLAY_DIR: str(tmp_path / "replay")}
    said = []
    for die in (4, 10, 99):
        codes = gang.run(partial(program, die), world=1, env=env)
        assert codes == {0: 0 if die == 99 else 9}, gang.last_words()
        said += re.findall("restart (.*)", gang.log(0))
        gang.log_path(0).unlink()
    assert [line.partition(":")[0] for line in said] == ["not proven", "not proven"], said
    assert "step 4, done again after the restart, differs on rank 0 in its loss" in said[0]
    assert re.search("steps 10 to 1[01] are equal again, but step 4 differed", said[1])


@pytest.mark.tier("all")
@pytest.mark.fault("T1")
def test_the_launcher_tells_what_came_of_it(tmp_path):
    training = Training(tmp_path)
    (port,) = free_ports(1)
    try:
        training.hold("1-0-step-9", "1-1-end")
        ways = ("--spares", "0", "--metrics-port", str(port))
        training.launch(*ways, DDPJOB_TRAINER_RESCUE="0")  # with it no step is done again
        ranks = training.at("1-0-step-9")
        durable = "snapshots/*/step-*.json"  # else the restart begins anew, and proves nothing
        training.until(lambda: any(training.directory.glob(durable)), "a snapshot is durable")
        kill(ranks[1])
        training.at("1-1-end")
        proof = json.loads(page(port, "state")).get("proof")
        assert (proof["equal"], proof["last"]) == (True, 9)
        assert 'ddpjob_trainer_resume_proven{rank="0"} 1.0' in page(port, "metrics")
        kill(*training.at("1-1-end")[1:2])
    finally:
        training.end()
