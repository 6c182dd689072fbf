"""An optimizer whose state is divided among the ranks: each stores its part, all get the whole."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from ddpjob_trainer.snapshot.ondisk import manifest
from ddpjob_trainer.snapshot.ondisk.files import data_name
from ddpjob_trainer.snapshot.restore import load
from ddpjob_trainer.snapshot.save.layout import Captured, Draft, fingerprint, lay_out
from ddpjob_trainer.snapshot.save.part_reports import PartReports, Report
from ddpjob_trainer.snapshot.training_state import TrainingState
from ddpjob_trainer.state.stateful import Divided
from support.sealed import board
from support.snapshots import Store, open_snapshots, whole

RANKS = 3


class Share(Divided):
    """One rank's: of every so many parameters one."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
        self.optimizer, self.rank, self.ranks = optimizer, rank, ranks
        self.given: Collection[int] = ()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def part(self) -> dict[str, Any]:
        found = self.state_dict()
        return {**found, "state": {n: s for n, s in found["state"].items() if n in self.held()}}

    def held(self) -> Collection[int]:
        return range(self.rank, 8, self.ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = list(state["state"])
        self.optimizer.load_state_dict(state)


def trained(seed: int, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    groups = [{"params": model[0].parameters()},
              {"params": model[1:].parameters(), "lr": 0.5, "betas": (0.5, 0.9)}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
    model[3].bias.requires_grad_(False)
    for _ in range(steps):
        model(torch.randn(7, 5)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


def registered(model: nn.Module, optimizer: Any) -> TrainingState:
    state = TrainingState(model)
    state.register("optimizer", optimizer)
    return state


def save(store: Store, step: int, every: list[Captured]) -> None:
    reports = []
    for rank, captured in enumerate(every):
        image = lay_out(captured.structure, len(every), rank)
        content = bytearray(image.bytes)
        content[: len(image.header)] = image.header
        for at, tensor in sum(image.copies(captured), ()):
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            content[at : at + len(raw)] = raw
        crc = store.files.write(data_name(step, store.nonce, rank), memoryview(content))
        structure = captured.structure
        own = tuple((name, *shape) for name, shape in (*structure.own, *structure.part))
        parts = captured.part.tree
        reports.append(Report(rank, image.bytes, crc, own, fingerprint(structure), parts=parts))
    flat = every[0].flat
    draft = Draft(step, {}, every[0].structure, store.nonce, flat.tree, flat.aliases)
    store.files.commit(step, draft.manifest(reports).encode())


def captured_by(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> list[Captured]:
    shares = [Share(optimizer, rank, ranks) for rank in range(ranks)]
    return [registered(model, share).capture(rank) for rank, share in enumerate(shares)]


@pytest.mark.parametrize("steps", [0, 3], ids=["nothing yet", "trained"])
def test_what_is_on_disk_is_what_an_undivided_optimizer_would_have_left(tmp_path: Path, steps: int):  # type: ignore[no-untyped-def]
    model, optimizer = trained(1, steps)
    store, _ = open_snapshots(tmp_path)
    save(store, 1, captured_by(model, optimizer, RANKS))
    plain = registered(model, optimizer).capture(0).flat
    path = store.directory / manifest.file_name(1)
    loaded = whole(load.open_source(store.directory, manifest.read(path)))
    assert loaded.tree == plain.tree
    assert loaded.aliases == plain.aliases
    for name, tensor in plain.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor), name
    rest = loaded.tensors.keys() - plain.tensors.keys()
    assert rest == {f"rank/{rank}/tree" for rank in range(RANKS)}


@pytest.mark.parametrize("ranks", [RANKS, 2])
def test_each_rank_is_given_its_part_whatever_their_number_was(tmp_path: Path, ranks: int):  # type: ignore[no-untyped-def]
    model, optimizer = trained(1)
    store, _ = open_snapshots(tmp_path)
    save(store, 1, captured_by(model, optimizer, RANKS))
    _, loaded = open_snapshots(tmp_path, 2)
    assert loaded is not None
    wanted = optimizer.state_dict()
    for rank in range(ranks):
        share = Share(trained(2)[1], rank, ranks)
        registered(trained(2)[0], share).restore(loaded, rank)
        assert share.given == [n for n in share.held() if n in wanted["state"]]
        found = share.optimizer.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        for number in share.given:
            for name, value in wanted["state"][number].items():
                assert torch.equal(found["state"][number][name], value)


def test_a_part_is_written_once_and_by_who_holds_it_while_training_goes_on():  # type: ignore[no-untyped-def]
    every = captured_by(*trained(1), RANKS)
    names = [set(captured.part.tensors) for captured in every]
    assert sum(map(len, names)) == len(set().union(*names)) == 7 * 4
    for rank, captured in enumerate(every):
        assert not names[rank] & captured.flat.tensors.keys()
        image = lay_out(captured.structure, RANKS, rank)
        later = {content.data_ptr() for _, content in image.copies(captured)[1]}
        assert {t.data_ptr() for t in captured.part.tensors.values()} <= later


def test_two_that_hold_the_same_make_no_snapshot(tmp_path: Path):  # type: ignore[no-untyped-def]
    model, optimizer = trained(1)
    store, _ = open_snapshots(tmp_path)
    shares = [Share(optimizer, rank, RANKS) for rank in (0, 1, 1)]
    every = [registered(model, share).capture(rank) for rank, share in enumerate(shares)]
    with pytest.raises(ValueError, match="rank 2 has 'registered/optimizer/state/1/step', as"):
        save(store, 1, every)
    assert not list(store.directory.glob("step-*.json"))


def test_more_than_the_store_takes_is_a_failed_snapshot():  # type: ignore[no-untyped-def]
    """torch's own would cut the rank off, at this snapshot and after each restart at the next."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
    mine, theirs = (PartReports(board(one), (0, 1)) for one in (store, other))
    series = [0.123456789] * 700_000
    theirs.post(4, Report(1, 9, 9, parts={"optimizer": [[0, series]]}))
    mine.post(4, Report(0, 9, 9))
    found = mine.complete(4)
    assert found is not None
    assert found[0].text == ""
    assert "takes 8 MiB, more than 7: keep series of numbers in tensors, or" in found[1].text
