"""The record of a rank's steps: what survives a kill, and what a comparison says of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.launcher.reports.state import Results
from ddpjob_trainer.liveness.heartbeat import PROOF, RankStateWriter, read_report
from ddpjob_trainer.training.replay import replay
from ddpjob_trainer.training.replay.records import (
    BYTES,
    CAPACITY,
    KEY_BYTES,
    Comparison,
    Entry,
    Records,
    difference,
    record_path,
)
from ddpjob_trainer.training.replay.replay import Digest, Replay, of_generators

KEY = b"k" * KEY_BYTES
CPU = torch.device("cpu")


def entry(step: int, **more: Any) -> Entry:
    return Entry(**{"step": step, "batches": 2, "random": 3, "losses": 4, "weights": 0,
                    "first_loss": 0.5, **more})  # fmt: skip


def test_the_next_process_finds_what_was_written(tmp_path):
    path = tmp_path / "replay" / "rank-0"
    first = Records(path, KEY)
    assert first.found is None
    for step in range(1, 4):
        first.put(entry(step))
    second = Records(path, KEY)
    assert second.found == {step: entry(step) for step in range(1, 4)}
    second.put(entry(2, losses=9))
    assert Records(path, KEY).found == {1: entry(1), 2: entry(2, losses=9), 3: entry(3)}
    assert [found.name for found in path.parent.iterdir()] == ["rank-0"]
    second.remove()
    assert Records(path, KEY).found is None


def test_the_newest_steps_are_kept_and_none_that_comes_after_a_difference(tmp_path):
    records = Records(tmp_path / "rank-0", KEY)
    for step in range(1, CAPACITY + 11):
        records.put(entry(step))
    assert sorted(Records(tmp_path / "rank-0", KEY).found or ()) == list(range(11, CAPACITY + 11))
    again = Records(tmp_path / "rank-0", KEY)
    again.forget_after(12)
    assert Records(tmp_path / "rank-0", KEY).found == {11: entry(11), 12: entry(12)}


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * BYTES, b"ddpjob replay 2\0" + b"o" * 900])
def test_a_file_of_another_run_is_no_record(tmp_path, data):
    (tmp_path / "rank-0").write_bytes(data)
    assert Records(tmp_path / "rank-0", KEY).found is None
    Records(tmp_path / "rank-0", KEY).put(entry(1))
    assert Records(tmp_path / "rank-0", b"o" * KEY_BYTES).found is None
    assert len({record_path(tmp_path, rank, Path(s)) for rank in (0, 1) for s in "ab"}) == 4


def test_losses_and_weights_decide_and_the_first_that_differs_is_named():
    for weights, change, what in (
        (0, {}, None),
        (0, {"batches": 9}, None),  # it may carry a path
        (0, {"random": 9}, None),  # the next step has a seed of its own
        (0, {"losses": 9}, "loss"),
        (0, {"losses": 9, "random": 9}, "random numbers"),
        (0, {"losses": 9, "random": 9, "batches": 9}, "batch"),
        (0, {"weights": 9}, None),  # not known before
        (5, {"weights": 6}, "weights"),
        (5, {"weights": 5}, None),
        (5, {"weights": 6, "batches": 9}, "batch"),
    ):
        assert difference(entry(4, weights=weights), entry(4, **change)) == what, change


def test_a_comparison_ends_with_the_last_step_or_the_first_difference():
    equal = Comparison({step: entry(step) for step in (5, 6)})
    assert not equal.add(entry(5))
    assert equal.pending
    assert not equal.add(entry(6))
    assert (equal.pending, equal.found.what) == (False, None)
    assert (equal.found.first, equal.found.last) == (5, 6)

    other = Comparison({step: entry(step) for step in (5, 6, 7)})
    other.add(entry(5))
    assert other.add(entry(6, losses=9))
    assert not other.add(entry(7, losses=9))
    assert (other.pending, other.found.last) == (False, 5)
    assert (other.found.step, other.found.what) == (6, "loss")

    hole = Comparison({6: entry(6)})  # is not waited for
    hole.add(entry(5))
    assert hole.pending
    hole.add(entry(7))
    assert (hole.pending, hole.found.last) == (False, 0)


def of(value: Any) -> int:
    digest = Digest()
    digest.add(value)
    return digest.value()


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(6, 3), torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(4).to(torch.bfloat16), torch.randn(4, dtype=torch.complex64).conj(),
        torch.arange(7), torch.zeros(0, 3), torch.tensor(2.5), torch.eye(3).to_sparse(),
        torch.randn(3, 4, requires_grad=True).t(), np.arange(12.0).reshape(3, 4)[:, ::-1],
        torch.nested.nested_tensor([torch.ones(2)]),
        {"x": torch.ones(2), "name": ["a", None, 3, 2.5, b"z", True]}, (), object,
    ],
)  # fmt: skip
def test_what_batches_hold_has_a_hash_that_does_not_change(value):
    assert of(value) == of(value)


def test_other_samples_have_another_hash():
    x = torch.randn(64, 12)
    swapped = x.clone()
    swapped[[8, 9]] = x[[9, 8]]
    hashes = {of(one) for one in (x, swapped, x[:63], x.double(), (x,), {"x": x}, x.numpy())}
    assert len(hashes) == 7
    assert of(["a", 1]) != of(["a", 2])


def test_what_numpy_can_read_is_not_sampled_by_torch():
    """Which takes three times as long, at each parameter."""

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            assert func is torch.ops.aten.detach.default
            return func(*args, **(kwargs or {}))

    weight = torch.nn.Linear(3, 4).weight
    with Ops():
        Digest().sample(weight)


def test_draws_from_a_global_generator_change_the_hash():
    before = [of_generators(CPU)]
    assert of_generators(CPU) == before[0]
    for draw in (torch.rand, torch.randn):
        draw(1)
        before.append(of_generators(CPU))
    assert len(set(before)) == 3


class Life:
    def __init__(
        self, path: Path, done: int, facts: Any = "same", mark: Any = None, program: str = "a"
    ) -> None:
        self.proofs: list[Any] = []
        progress: Any = SimpleNamespace(proven=self.proofs.append)
        world: Any = SimpleNamespace(
            rank=0, device=CPU, accelerator=accelerator.of(CPU),
            gather_bytes=lambda what, data: [data],
        )  # fmt: skip
        self.replay = Replay(world, progress, path)
        self.replay.begin(done, {"facts": facts, "program": program}, mark)
        self.step = done

    def do(self, *losses: float, end: bool = False) -> None:
        for loss in losses:
            self.replay.batch(torch.ones(3))
            report = self.replay.report()
            step: Any = SimpleNamespace(index=self.step, losses=[torch.tensor(loss)])
            self.replay.receive(report)
            self.replay.step_ended(step)
            self.replay.known()
            self.step += 1
            self.replay.conclude(end=end)


LOSSES = (1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(replay, "say", lambda rank, text: found.append(text))
    return found


def test_a_restart_is_proven_once_its_steps_were_done_again(tmp_path, said):
    Life(tmp_path / "r", 0).do(*LOSSES)
    Life(tmp_path / "r", 2).do(3.0)  # and killed: the rest is left to the next
    life = Life(tmp_path / "r", 2)
    life.do(3.0, 4.0)
    assert (life.proofs, said) == ([], [])
    life.do(5.0, 6.0)
    assert life.proofs == [{"equal": True, "first": 3, "last": 5}]
    assert said == ["restart proven: steps 3 to 5 again, bit for bit"]
    life.replay.conclude(end=True)
    assert not (tmp_path / "r").exists()


def test_a_difference_is_said_once_and_each_restart_before_it_differs(tmp_path, said):
    Life(tmp_path / "r", 0).do(*LOSSES)
    life = Life(tmp_path / "r", 2)
    life.do(3.0, 4.5, 5.5, 6.5)
    assert life.proofs == [{"equal": False, "step": 4, "rank": 0, "what": "loss"}]
    (text,) = said
    assert "step 4, done again after the restart, differs on rank 0 in its loss, 4 before" in text
    again = Life(tmp_path / "r", 3)
    again.do(4.5, 5.5, 6.5, 7.5)
    assert again.proofs == life.proofs  # not with what had been lost already


def test_two_resumed_rounds_that_agree_are_no_proof_after_a_difference(tmp_path, said):
    path, false = tmp_path / "r", {"equal": False, "step": 4, "rank": 0, "what": "loss"}
    Life(path, 0).do(*LOSSES)
    life = Life(path, 2)
    life.do(3.0, 4.5)  # known to all with the next step: the snapshot of step 4 has no mark
    assert life.replay.mark() is None
    life.do(5.5, 6.5)
    unmarked = Life(path, 4)
    unmarked.do(5.5, 6.5)
    assert unmarked.proofs == []
    life = Life(path, 2)
    life.do(3.0, 4.5, 5.5)
    mark = life.replay.mark()  # in the snapshot of step 5
    life.do(6.5, 7.5)
    again = Life(path, 5, mark=mark)
    again.do(6.5, 7.5, 8.5)
    assert (again.proofs, again.replay.mark()) == ([false], mark)
    assert "restart not proven: steps 6 to 7 are equal again, but step 4 differed" in said[-1]
    # A changed program begins with that snapshot: what it makes is without the mark.
    changed = Life(path, 5, mark=mark, program="b")
    changed.do(6.5, 7.5, 8.5)
    assert changed.replay.mark() is None
    restarted = Life(path, 5, mark=mark, program="b")  # which is not yet from one of its own
    restarted.do(6.5, 7.5, 8.5, 9.5)
    assert restarted.proofs == [false]
    proven = Life(path, 7, mark=restarted.replay.mark(), program="b")
    proven.do(8.5, 9.5, 9.9)
    assert proven.proofs == [{"equal": True, "first": 8, "last": 9}]
    for odd in ("x", {}, {"proof": 3}, {"proof": {"equal": False}}):
        assert Life(path, 8, mark=odd, program="b").replay.mark() is None


@pytest.mark.parametrize(("done", "facts"), [(0, "same"), (2, "others"), (5, "same")])
def test_nothing_is_claimed_of_what_was_not_compared(tmp_path, said, done, facts):
    Life(tmp_path / "r", 0).do(*LOSSES)
    life = Life(tmp_path / "r", done, facts)
    life.do(7.0, 8.0, 9.0, end=True)
    assert life.proofs == [{"unchecked": words} for words in said]
    assert [text.partition(":")[0] for text in said] == ["restart not checked"] * (facts != "same")


def test_a_disk_without_room_stops_no_training(tmp_path, said):
    (tmp_path / "file").touch()
    life = Life(tmp_path / "file" / "r", 0)
    life.do(1.0)
    assert ["restart check off" in text for text in said] == [True]


def test_the_launcher_reads_the_proof_and_no_unchecked_restart_undoes_it(tmp_path):
    gang: Any = SimpleNamespace(
        state=lambda rank: None, snapshot_step=lambda: -1, state_dir=tmp_path
    )
    assert read_report(tmp_path, PROOF) is None
    tells, known = RankStateWriter(tmp_path, 0), Results()
    for proof in (None, {"unchecked": "why"}, {"equal": True}, {"equal": False}):
        if proof is not None:
            tells.report(PROOF, proof)  # type: ignore[arg-type]
        known = known.after(gang)
        assert known.proof == proof
    tells.report(PROOF, {"unchecked": "why"})
    assert known.after(gang).proof == {"equal": False}
    (tmp_path / "proof.json").write_text("[")
    assert read_report(tmp_path, PROOF) is None
