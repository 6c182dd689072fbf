"""What a survivor keeps of the newest step boundary, and how it saves that at a launcher's word."""

import json
import random
import selectors
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpjob_trainer.gpu import accelerator
from ddpjob_trainer.gradients.ddp import DdpAveraging
from ddpjob_trainer.launcher.hub.messages import Rescuing
from ddpjob_trainer.launcher.rescue import Rescuer
from ddpjob_trainer.liveness.marks import Marks, MarksWriter, read_marks, socket_path
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles
from ddpjob_trainer.snapshot.restore.load import open_source
from ddpjob_trainer.snapshot.training_state import TrainingState, flat_sha256
from ddpjob_trainer.state.stateful import Modes, Values
from ddpjob_trainer.training import rescue as rescue_
from ddpjob_trainer.training.loop import Loop
from ddpjob_trainer.training.rescue import Boundary, ChangedError, Rescue, word_of
from support.patience import PATIENCE
from support.snapshots import whole
from support.trained import Trained

RANK = 2
CPU = accelerator.of(torch.device("cpu"))


@pytest.fixture
def trained() -> Trained:
    made = Trained()
    made.boundary.take(0)
    made.step(1)
    return made


def test_what_a_body_changes_is_as_the_boundary_left_it(trained):
    then = trained.sha256()
    trained.body()
    assert trained.sha256() != then
    assert flat_sha256(trained.boundary.captured(0).flat) == then
    facts = {"best": {"net.safetensors": [2.0, "min"]}, "modes": {"training": {}}}
    assert trained.boundary.facts(0) == facts | {"modes": {"training": {}, "requires_grad": {}}}
    trained.step(2)
    assert flat_sha256(trained.boundary.captured(0).flat) == trained.sha256() != then
    assert trained.boundary.facts(0)["modes"]["training"] == {"model.1": False}


def test_only_rank_0_saves_the_step_in_which_keep_best_found_more(trained):
    trained.body()
    trained.step(2)
    assert "other" in trained.boundary.facts(0)["best"]
    with pytest.raises(ChangedError, match=r"rank 0 may not have saved what keep_best\(\) found"):
        trained.boundary.facts(1)
    trained.step(3)  # rank 0 has been at its update, so past that
    assert trained.boundary.facts(1) == trained.boundary.facts(0)


def test_nobody_reads_while_an_update_runs_and_none_begins_while_one_reads(trained):
    trained.boundary.wait_for_readers()
    with pytest.raises(ChangedError, match="does not end"), trained.boundary.reading(0):
        pass
    trained.boundary.take(2)
    with trained.boundary.reading(0):
        assert not trained.boundary._lock.acquire(blocking=False)  # as wait_for_readers() would
    trained.boundary.wait_for_readers()


def test_a_copy_that_fails_ends_the_rescue_and_not_the_training(monkeypatch, trained):
    def clone(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trained.boundary.keeps_whole = True
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    trained.step(2)
    trained.step(3)
    assert trained.boundary.why_not == "the state cannot be copied: CUDA out of memory"
    with trained.boundary.reading(0), pytest.raises(ChangedError, match="out of memory"):
        trained.boundary.captured(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: nn.init.ones_(net[0].weight), "has changed a parameter"),
        (lambda net: setattr(net[1], "running_mean", torch.ones(3)), "running_mean"),
    ],
)
def test_a_state_of_no_boundary_is_refused(trained, change, words):
    change(trained.net)
    with pytest.raises(ChangedError, match=words):
        trained.boundary.captured(0)


def test_what_only_one_rank_has_is_refused():
    def refusal(name: str, obj: Any, *, per_rank: bool = False) -> str:
        state = TrainingState(nn.Linear(2, 2))
        state.register(name, obj, per_rank=per_rank)
        return Boundary(state, (), Modes({}), dict).why_not

    assert refusal("mine", {"x": 1}, per_rank=True) == "only each rank has its own 'mine'"
    assert "steps an optimizer" in refusal("o", torch.optim.SGD([torch.ones(1)], lr=0.1))
    assert refusal("values", Values({"best": 1.0})) == ""


@pytest.mark.parametrize("what", ["seen", "buffer"])
def test_what_a_body_changes_must_be_equal_on_all_ranks(trained, what):
    """Rank 0's buffers count, also where a body changes them after its commit()."""
    mine = trained.boundary.digest()
    (trained.seen["mean"] if what == "seen" else trained.net[1].running_mean).add_(1)
    trained.boundary.take(2)
    other = trained.boundary.digest()
    trained.boundary.compare([3 * number for number in other], 3)
    assert trained.boundary.why_not == ""
    trained.boundary.compare([2 * a + b for a, b in zip(other, mine, strict=True)], 3)
    assert "registered objects, or buffers" in trained.boundary.why_not


def test_with_a_rescue_rank_0_shares_its_buffers_before_the_update():
    world: Any = SimpleNamespace(rank=1, size=2)
    options: Any = SimpleNamespace(micro_batches=1, global_batch=8)
    for rescue in (False, True):
        shared: list[str] = []
        averaging = DdpAveraging(options, world, rescue=rescue)
        model: Any = SimpleNamespace(
            require_forward_param_sync=True, require_backward_grad_sync=True,
            modules_buffers=[torch.ones(1)], _sync_buffers=lambda: shared.append("commit"),  # noqa: B023
        )  # fmt: skip
        averaging._models = [model]
        for _ in range(3):
            averaging._shared.clear()  # as parts() does
            averaging.before_forward(model, 0, graph=True)
            shared += ["forward"] * model.require_forward_param_sync
            averaging.share_buffers()
        # In the forward too: a body may change them after its commit().
        assert shared == (["forward", "commit"] * 3 if rescue else ["forward"] * 3)


# --- The thread --------------------------------------------------------------------------------


class Launcher:
    """The other end of a worker's socket."""

    def __init__(self, directory: Path, rank: int = RANK) -> None:
        self._path = str(socket_path(directory, rank))
        self._link = socket.socket(socket.AF_UNIX)
        self._link.settimeout(PATIENCE)
        self._lines = self._link.makefile("rb")

    def say(self, **facts: Any) -> None:
        with suppress(OSError):  # it is connected; a worker waits for a moment only
            self._link.connect(self._path)
        self._link.sendall(json.dumps(facts).encode() + b"\n")

    def hear(self) -> Any:
        return json.loads(self._lines.readline())

    def close(self) -> None:
        self._lines.close()
        self._link.close()


@pytest.fixture
def survivor(trained, tmp_path):  # type: ignore[no-untyped-def]
    files = SnapshotFiles(tmp_path, 1, "abcd", 2)
    files.directory.mkdir()
    world: Any = SimpleNamespace(rank=RANK, size=3, accelerator=CPU)
    snapshots: Any = SimpleNamespace(alone=lambda: (files, 0.25), made=20, newest=10)
    rescue = Rescue(tmp_path, world, snapshots)
    rescue.begin(trained.boundary, lambda: {"seed": 7, "best": {}}, 24)
    trained.body()
    launcher = Launcher(tmp_path)
    yield rescue, launcher, files.directory
    launcher.close()


def test_an_evaluation_after_the_update_is_said_to_repeat_steps_once(survivor, capfd):
    rescue, *_ = survivor
    rescue.evaluates()  # rank 0 says it
    rescue._world = SimpleNamespace(rank=0)
    rescue.evaluates()
    rescue.evaluates()
    assert capfd.readouterr().err.count("call run.evaluate() first in the loop's body") == 1


def test_a_survivor_saves_its_boundary_once_another_one_agrees(trained, survivor):
    _, launcher, directory = survivor
    launcher.say(do="write", seconds=PATIENCE)
    assert launcher.hear() == {"step": 24}
    assert manifest.listed(directory) == []
    launcher.say(word=word_of(24, trained.boundary.captured(0)))
    assert launcher.hear() == {"done": 24}
    [path] = manifest.listed(directory)
    found = manifest.read(path)
    assert found.config["rescued"] == {"rank": RANK, "newest": 10}
    assert (found.step, found.config["seed"], found.config["best"]) == (
        24, 7, {"net.safetensors": [2.0, "min"]},
    )  # fmt: skip
    then = trained.boundary.captured(0).flat
    assert flat_sha256(whole(open_source(directory, found))) == flat_sha256(then)


def test_without_a_second_opinion_nothing_counts(trained, survivor):
    _, launcher, directory = survivor
    average = trained.optimizer.state[trained.net[0].weight]["exp_avg"].numpy()
    sound = average.copy()
    average[0, 0] += 1e-9  # a bit that has flipped in the memory of the other one
    word = word_of(24, trained.boundary.captured(0))
    average[:] = sound
    launcher.say(do="write", seconds=PATIENCE)
    assert launcher.hear() == {"step": 24}
    launcher.say(word=word)
    assert launcher.hear() == {"no": "no other rank holds the same bits"}
    assert list(directory.iterdir()) == []


def test_a_commit_that_fails_past_its_rename_keeps_the_data(monkeypatch, trained, survivor):
    _, launcher, directory = survivor
    commit = disk.commit

    def fails_late(path, content):
        commit(path, content)
        raise OSError("the directory was not synced")

    monkeypatch.setattr(disk, "commit", fails_late)
    launcher.say(do="write", seconds=PATIENCE)
    launcher.hear()
    launcher.say(word=word_of(24, trained.boundary.captured(0)))
    assert launcher.hear() == {"no": "the directory was not synced"}
    [path] = manifest.listed(directory)
    assert whole(open_source(directory, manifest.read(path)))


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize(("other", "saves"), [("equal", True), ("other bits", False), ("", False)])
def test_a_single_survivor_needs_the_hash_of_the_step_before(
    trained, tmp_path, others, other, saves
):
    """ "": a hash would take too much of a step."""
    world: Any = SimpleNamespace(rank=others, size=1 + others, accelerator=CPU)
    files = SnapshotFiles(tmp_path, 1, "abcd", 2)
    files.directory.mkdir()
    snapshots: Any = SimpleNamespace(alone=lambda: (files, 0.25), made=20, newest=10)
    rescue = Rescue(tmp_path, world, snapshots)
    rescue.begin(trained.boundary, dict, 23)
    rescue._paced, rescue._pace = 1, PATIENCE
    rescue._hash_due = 0 if other else 24
    mine = rescue.report()
    sums = [(1 + others) * number for number in mine]
    if other == "other bits":
        sums[2] += 1
        sums[3] += 2 * mine[2] + 1
    rescue.wait_for_readers()
    rescue.step_ended(24)
    assert not read_marks(tmp_path, others).vouched
    rescue.receive(sums)
    assert read_marks(tmp_path, others).vouched == saves
    launcher = Launcher(tmp_path, others)
    launcher.say(do="alone" if others == 1 else "write", seconds=PATIENCE)
    launcher.say(word="none")  # who was to vouch is gone
    assert launcher.hear() == {"step": 24}
    assert ("done" in launcher.hear()) == saves == bool(manifest.listed(files.directory))
    launcher.close()


def test_two_ranks_hash_together_and_seldom_where_a_hash_takes_long(monkeypatch, tmp_path):
    clock = SimpleNamespace(monotonic=lambda: now[rank], perf_counter=lambda: now[rank])
    monkeypatch.setattr(rescue_, "time", clock)
    snapshots: Any = SimpleNamespace(alone=lambda: (None, 0.25), made=20, newest=10)
    ranks: list[Any] = []
    for rank in (0, 1):
        world: Any = SimpleNamespace(rank=rank, size=2)
        ranks.append(Rescue(tmp_path, world, snapshots))
        ranks[rank]._boundary = SimpleNamespace(
            step=0, why_not="", take=lambda step: None, digest=lambda: [0.0, 0.0],
            captured=lambda rank: None, compare=lambda sums, ranks: None,
        )  # fmt: skip
    hashed: list[list[int]] = [[], []]

    def hashes(step: int, captured: object) -> str:
        now[rank] += (1.0, 5.0)[rank]
        hashed[rank].append(step)
        return "the same bits"

    monkeypatch.setattr(rescue_, "word_of", hashes)
    now = [100.0, 100.0]
    for step in range(1200):
        now = [max(now) + 0.5] * 2
        sent = []
        for rank in (0, 1):
            ranks[rank]._boundary.step = step
            ranks[rank].step_ended(step)
            sent.append(ranks[rank].report())
        for rank in (0, 1):
            ranks[rank].receive([a + b for a, b in zip(*sent, strict=True)])
    assert hashed[0] == hashed[1]
    assert len(hashed[0]) == 2


def test_who_vouches_writes_nothing(trained, survivor):
    rescue, launcher, directory = survivor
    launcher.say(do="vouch", seconds=PATIENCE)
    assert launcher.hear() == {"step": 24}
    assert launcher.hear() == {"word": word_of(24, trained.boundary.captured(0))}
    assert list(directory.iterdir()) == []
    rescue.hold()  # returns: what the launcher wanted is done


@pytest.mark.parametrize("what", ["write", "vouch"])
@pytest.mark.parametrize("flag", ["stop_called", "enough"])
def test_a_word_of_stop_that_is_in_no_snapshot_is_not_lost(survivor, what, flag):
    rescue, launcher, _ = survivor
    exchange = SimpleNamespace(**{"stop_called": False, "enough": False, flag: True})
    loop: Any = SimpleNamespace(exchange=exchange, snapshots=SimpleNamespace(facts=dict))
    rescue._config = lambda: Loop._facts(loop)
    launcher.say(do=what, seconds=PATIENCE)
    assert launcher.hear() == {"no": "step.stop() was called, which the next start would not know"}
    setattr(exchange, flag, False)
    assert rescue._config() == {}


def test_a_step_after_which_rank_0_had_more_to_do_is_left_under_way(survivor):
    """It may be a file, or an evaluation, which only a step that is done again brings."""
    _, launcher, directory = survivor
    launcher.say(do="write", seconds=PATIENCE, most=23)
    assert launcher.hear() == {"no": "rank 0 had more to do after the step's commit()"}
    assert list(directory.iterdir()) == []


def test_an_update_that_does_not_end_leaves_the_older_snapshot(trained, survivor):
    rescue, launcher, directory = survivor
    rescue.wait_for_readers()
    assert not read_marks(directory.parent, RANK).intact
    launcher.say(do="write", seconds=0)
    assert launcher.hear() == {"no": "an update, or the body after it, does not end"}


def test_nobody_stays_longer_than_a_launcher_may_need(monkeypatch, survivor):
    monkeypatch.setattr(rescue_, "HOLD_SECONDS", 0.0)
    rescue, *_ = survivor
    rescue.hold()


def test_marks_tell_what_a_rescue_would_save(tmp_path):
    assert read_marks(tmp_path, 0) == Marks()
    writer = MarksWriter(tmp_path, 0)
    assert not read_marks(tmp_path, 0).whole
    writer.write(marks := Marks(124, 100, True, True, 0.5, 3.0))
    assert read_marks(tmp_path, 0) == marks
    assert marks.saved == 12.0
    assert Marks(5, -1, True, True, 1.0).saved == 5.0


# --- Its launcher ------------------------------------------------------------------------------


class Seat:
    """A launcher whose workers are the ranks given, in this process; ``said`` goes to the hub.

    ``trained``: what all of them hold, or each.
    """

    def __init__(
        self, trained: Trained | dict[int, Trained], directory: Path, *ranks: int, pays: bool = True
    ) -> None:
        files = SnapshotFiles(directory, 1, "abcd", 2)
        files.directory.mkdir(exist_ok=True)
        self.directory = files.directory
        self.said: list[Rescuing] = []
        self.ended: list[float] = []
        self.outliving: list[set[int]] = []
        self.selector = selectors.DefaultSelector()
        for rank in ranks:
            world: Any = SimpleNamespace(rank=rank, size=3, accelerator=CPU)
            snapshots: Any = SimpleNamespace(alone=lambda: (files, 0.25), made=20, newest=20)
            rescue = Rescue(directory, world, snapshots)
            held = trained[rank] if isinstance(trained, dict) else trained
            rescue.begin(held.boundary, dict, 24)
            assert rescue._marks is not None
            rescue._marks.write(Marks(24, 20, True, True, PATIENCE if pays else 0.01, 0.25))
        self.workers: Any = SimpleNamespace(
            state_dir=directory, round=0, pids=dict.fromkeys(ranks, 1), kill_at=None,
            kill_by=self.ended.append,
            end_all_but=lambda chosen, *times, **more: self.outliving.append(set(chosen)),
        )  # fmt: skip
        self.rescuer = Rescuer(
            self.workers, self.selector, lambda said, _: self.said.append(said), print
        )  # type: ignore[arg-type]

    def until(self, done: Callable[[], object]) -> None:
        while not done():
            for key, _ in self.selector.select(PATIENCE):
                key.data(100.0)


def test_two_workers_of_a_launcher_save_the_step_by_themselves(trained, tmp_path):  # type: ignore[no-untyped-def]
    # Both hold one boundary here, which one at a time may read: who vouches comes first.
    seat = Seat(trained, tmp_path, 1, 2)
    trained.boundary.reading = lambda seconds: nullcontext()
    assert seat.rescuer.begin("alone", 100.0)
    seat.until(lambda: seat.ended)
    assert seat.outliving == [{1, 2}]
    assert seat.said == [Rescuing(0, "yes", "own"), Rescuing(0, "done", "2 24")]
    assert [manifest.step_of(path.name) for path in manifest.listed(seat.directory)] == [24]
    seat.selector.close()


@pytest.mark.parametrize("what", ["parameters", "optimizer", "buffers"])
def test_a_bit_flipped_in_a_survivor_never_becomes_everybodys(trained, tmp_path, what):
    for seed in range(21):
        draw = random.Random(seed)
        held: dict[int, Trained] = {}
        for rank in (1, 2):
            held[rank] = Trained()  # which seeds its first step
            held[rank].step(1)
        (tmp_path / str(seed)).mkdir()
        seat = Seat(held, tmp_path / str(seed), *held)
        one = held[1 + seed % 2]  # who vouches, or writes
        places = {
            "parameters": list(one.net.parameters()),
            "optimizer": [t for s in one.optimizer.state.values() for t in s.values()],
            "buffers": list(one.boundary._backups[0].copies),
        }
        if flipped := seed < 20:
            bits = draw.choice(places[what]).detach().numpy().reshape(-1).view("uint8")
            bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(8)
        assert seat.rescuer.begin("alone", 100.0)
        seat.until(lambda seat=seat: seat.ended)
        assert bool(manifest.listed(seat.directory)) == (not flipped)
        seat.selector.close()


@pytest.mark.parametrize(("alive", "asks"), [(True, {"0": None}), (False, {"1": 23, "2": 23})])
def test_rank_0_writes_where_it_lives_or_has_ended_the_step(trained, tmp_path, alive, asks):
    seat = Seat(trained, tmp_path, *([0] * alive), 1, 2)
    MarksWriter(tmp_path, 0).write(Marks(23, 20, True, True, PATIENCE, 0.25))
    asked: dict[str, object] = {}
    seat.rescuer._ask = lambda rank, *_: asked.update(  # type: ignore[method-assign]
        {str(rank): int(seat.rescuer._most) if rank else None}
    )
    assert seat.rescuer.begin("write", 100.0)
    assert asked == asks
    seat.selector.close()


def test_the_last_worker_of_two_saves_alone_where_the_other_has_vouched(trained, tmp_path):  # type: ignore[no-untyped-def]
    seat = Seat(trained, tmp_path, 1)
    MarksWriter(tmp_path, 1).write(Marks(24, 20, True, True, PATIENCE, 0.25, vouched=True))
    assert seat.rescuer.begin("alone", 100.0)
    seat.until(lambda: seat.said)
    assert seat.said == [Rescuing(0, "yes", "own")]
    seat.until(lambda: seat.ended)
    seat.selector.close()


def test_one_worker_waits_for_the_word_of_another_launcher(trained, tmp_path):  # type: ignore[no-untyped-def]
    seat = Seat(trained, tmp_path, 1)
    assert not seat.rescuer.begin("alone", 100.0)
    assert seat.rescuer.begin("write", 100.0)
    seat.until(lambda: len(seat.said) == 2)
    assert seat.said == [Rescuing(0, "no"), Rescuing(0, "yes")]
    assert manifest.listed(seat.directory) == []
    seat.rescuer.agree(word_of(24, trained.boundary.captured(0)))
    seat.until(lambda: seat.ended)
    assert seat.said[2:] == [Rescuing(0, "done", "1 24")]
    assert len(manifest.listed(seat.directory)) == 1
    seat.selector.close()


def test_a_launcher_passes_on_the_word_of_who_vouches(trained, tmp_path):  # type: ignore[no-untyped-def]
    seat = Seat(trained, tmp_path, 1)
    assert seat.rescuer.begin("vouch", 100.0)
    seat.until(lambda: seat.ended)
    assert seat.said == [Rescuing(0, "word", word_of(24, trained.boundary.captured(0)))]
    assert list(seat.directory.iterdir()) == []
    seat.selector.close()


def test_nothing_is_saved_where_it_does_not_pay_or_nobody_can(trained, tmp_path):  # type: ignore[no-untyped-def]
    cheap = Seat(trained, tmp_path, 1, 2, pays=False)
    assert not cheap.rescuer.begin("write", 100.0)
    assert cheap.said == [Rescuing(0, "no")]
    for path in tmp_path.glob("*.marks"):
        path.unlink()
    assert not cheap.rescuer.begin("write", 100.0)
    assert cheap.said[1:] == [Rescuing(0, "next")]
    assert cheap.outliving == []
    cheap.selector.close()
