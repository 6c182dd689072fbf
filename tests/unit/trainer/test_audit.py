"""The judgement of `ddpjob audit`, without a process: stories that were made up."""

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpjob_tools import cli
from ddpjob_tools.prove import cause, folder, report, samples
from ddpjob_tools.prove.cause import RIGHT, ROUNDING, UNKNOWN, WRONG, Finding, Runs
from ddpjob_tools.prove.probe.recorder import Watched
from ddpjob_tools.prove.record import Gang, Step, Steps, Story
from ddpjob_trainer.errors import ConfigError

EPOCH, TOTAL, KILLED, SAVED = 10, 40, 18, 15
Change = Callable[[int, Step], Step]


def ordinary(index: int) -> Step:
    """Step ``index`` (from 0) of a run whose samples come in another order every epoch."""
    epoch, place = divmod(index, EPOCH)
    samples = tuple(f"s{(place * (1, 3, 7, 9)[epoch % 4] + epoch) % EPOCH}.{i}" for i in range(4))
    return Step(
        weights=f"w{index}", parts=(f"a{index}", f"b{index}"), state=f"o{index}", empty=index == 0,
        hyper=({"lr": 0.1 / (1 + index // 7)},), rng={"torch": f"r{index}"},
        buffers={"net": f"n{index}"}, inputs=(f"in {samples}",), samples=samples,
        outputs=(f"y{index}",), loss=1.0, gradients=f"g{index}", norm=2.0, after=f"w{index + 1}",
    )  # fmt: skip


def story(steps: Sequence[Step], rank: int = 0, world: int = 1) -> Story:
    return Story(rank, world, ("first", "second"), steps=tuple(steps))


def run(change: Change | None = None, begin: int = 0, end: int = TOTAL, world: int = 1) -> Gang:
    """All ranks from step index ``begin`` on; ``change`` sees the index and rank 0's step."""
    steps = [ordinary(index) for index in range(begin, end)]
    changed = [change(index, step) for index, step in enumerate(steps, begin)] if change else steps
    others = (story(steps, rank, world) for rank in range(1, world))
    return (story(changed, 0, world), *others)


def changed(begin: int = SAVED, **values: Any) -> Change:
    """Another value from a step on; a function of the index where it is one."""

    def change(index: int, step: Step) -> Step:
        new = {name: value(index) if callable(value) else value for name, value in values.items()}
        return dataclasses.replace(step, **new) if index >= begin else step

    return change


def follows(index: int) -> dict[str, Any]:
    """What differs once training has gone another way."""
    return {"outputs": (f"z{index}",), "gradients": f"h{index}", "after": f"v{index + 1}",
            "loss": 3.0, "norm": 9.0}  # fmt: skip


def astray(begin: int = SAVED, **values: Any) -> Change:
    """The cause from ``begin`` on, its results in the same step, weights and state after it."""

    def change(index: int, step: Step) -> Step:
        if index < begin:
            return step
        new = {name: value(index) if callable(value) else value for name, value in values.items()}
        if index > begin:
            new = {"weights": f"v{index}", "state": f"p{index}", "buffers": {"net": f"m{index}"},
                   **new}  # fmt: skip
        return dataclasses.replace(step, **{**follows(index), **new})

    return change


def judged(resumed: Gang, **more: Any) -> cause.Verdict:
    given = {"undisturbed": run(), "killed": run(end=KILLED), "resumed": resumed, **more}
    return cause.judge(Runs(**given))


def of_step(index: int) -> dict[str, Any]:
    other = ordinary(index)
    return {"inputs": other.inputs, "samples": other.samples}


def samples_from(shift: Callable[[int], int]) -> Change:
    def change(index: int, step: Step) -> Step:
        return dataclasses.replace(astray()(index, step), **of_step(shift(index)))

    return change


def test_a_resume_with_all_equal_is_right():
    found = judged(run(begin=SAVED))
    assert (found.label, found.resumed_after, found.compared) == (RIGHT, SAVED, TOTAL - SAVED)
    assert found.final is True
    assert found.findings == ()


LOST = dataclasses.asdict(ordinary(0))["state"]

TABLE: dict[str, tuple[Gang, list[tuple[str, int]], dict[str, Any]]] = {
    "optimizer": (
        run(astray(state=lambda i: LOST if i == SAVED else f"p{i}", empty=lambda i: i == SAVED),
            begin=SAVED),
        [("state", SAVED + 1)], {"empty": True},
    ),
    "optimizer in part": (
        run(astray(state=lambda i: f"p{i}"), begin=SAVED), [("state", SAVED + 1)], {"empty": False}
    ),
    "scheduler, later": (
        run(astray(begin=21, hyper=({"lr": 0.5},)), begin=SAVED), [("hyper", 22)],
        {"changed": [("lr", 0.1 / 4, 0.5)]},
    ),
    "buffers": (
        run(changed(buffers=lambda i: {"net": f"m{i}"}), begin=SAVED), [("buffers", SAVED + 1)], {}
    ),
    "random numbers": (
        run(astray(rng=lambda i: {"torch": f"q{i}"}), begin=SAVED), [("rng", SAVED + 1)], {}
    ),
    "epoch begins again": (
        run(samples_from(lambda i: i - 5), begin=SAVED), [("inputs", SAVED + 1)],
        {"place": "begins", "count": 5, "epoch": 2},
    ),
    "samples repeated": (
        run(samples_from(lambda i: i - 2), begin=SAVED), [("inputs", SAVED + 1)],
        {"place": "repeated", "step": 14, "count": 2},
    ),
    "samples skipped": (
        run(samples_from(lambda i: min(i + 3, TOTAL - 1)), begin=SAVED), [("inputs", SAVED + 1)],
        {"place": "skipped", "step": 19, "count": 3},
    ),
    "the first epoch's order": (
        run(samples_from(lambda i: i - EPOCH if i < 2 * EPOCH else i), begin=SAVED),
        [("inputs", SAVED + 1)], {"place": "earlier", "step": 6, "from": 1, "epoch": 2},
    ),
    "shuffled otherwise": (
        run(lambda i, s: dataclasses.replace(
            astray()(i, s), inputs=(f"mixed {i}",), samples=ordinary(i - 4).samples), begin=SAVED),
        [("inputs", SAVED + 1)], {"place": "shuffled", "again": 16, "missing": 16, "count": 20},
    ),
    "hidden state": (run(astray(), begin=SAVED), [("unseen", SAVED + 1)], {"what": "outputs"}),
    "another end": (run(begin=SAVED, end=TOTAL + 3), [("length", TOTAL + 3)], {"total": TOTAL}),
    "nothing loaded": (run(), [("nothing-loaded", 1)], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_cause_is_named_and_what_follows_from_it_is_not(name):
    resumed, expected, facts = TABLE[name]
    found = judged(resumed)
    assert [(one.kind, one.step) for one in found.findings] == expected
    assert found.findings[0].facts.items() >= facts.items()
    assert found.label == WRONG
    for one in found.findings:
        assert report.said(one)
        assert report.cure(one, report.OWN)


def test_all_causes_of_the_first_step_and_later_wrong_samples_are_named():
    first = astray(state="", empty=True, hyper=({"lr": 0.1},))

    def change(index: int, step: Step) -> Step:
        return dataclasses.replace(
            first(index, step), **of_step(index - 1 if index > 25 else index)
        )

    found = judged(run(change, begin=SAVED))
    kinds = [(one.kind, one.step) for one in found.findings]
    assert kinds == [("state", SAVED + 1), ("hyper", SAVED + 1), ("inputs", 27)]


@pytest.mark.parametrize("world", [1, 3])
def test_rounding_is_no_mistake_and_hides_none(world):
    near = changed(gradients=lambda i: f"h{i}", after=lambda i: f"v{i + 1}", norm=2.0000001)
    later = changed(SAVED + 1, weights=lambda i: f"v{i}", outputs=lambda i: (f"z{i}",))

    def change(index: int, step: Step) -> Step:
        return later(index, near(index, step))

    undisturbed, killed = run(world=world), run(end=KILLED, world=world)
    found = judged(run(change, begin=SAVED, world=world), undisturbed=undisturbed, killed=killed)
    assert (found.label, [one.kind for one in found.findings]) == (ROUNDING, ["rounding"])
    assert ("DistributedDataParallel" in report.said(found.findings[0])) == (world > 2)

    def wrong(index: int, step: Step) -> Step:
        new = of_step(index - EPOCH if index >= 30 else index)
        return dataclasses.replace(change(index, step), **new)

    found = judged(run(wrong, begin=SAVED, world=world), undisturbed=undisturbed, killed=killed)
    assert found.label == WRONG
    assert [(one.kind, one.step) for one in found.findings] == [("rounding", 16), ("inputs", 31)]


def test_what_the_script_does_not_repeat_is_no_fault_of_the_restart():
    by_chance = astray(4, weights=lambda i: f"v{i}")
    found = judged(run(begin=SAVED), undisturbed=run(by_chance))
    assert (found.label, found.findings) == (UNKNOWN, ())
    assert re.search(r"step 5 on\n.*torch\.manual_seed", report.not_repeated(found))
    # What it did load is judged all the same, by the killed run itself.
    lost = astray(state="", empty=True)
    found = judged(run(lost, begin=SAVED), undisturbed=run(by_chance))
    assert (found.label, [one.kind for one in found.findings]) == (WRONG, ["state"])


def test_chance_is_not_judged_where_the_script_does_not_repeat_itself():
    undisturbed = run(astray(4, weights=lambda i: f"v{i}"))
    drawn = astray(16, rng=lambda i: {"torch": f"q{i}"})
    found = judged(run(drawn, begin=SAVED, end=TOTAL + 4), undisturbed=undisturbed)
    assert {one.kind for one in found.findings} == {"rng", "length"}
    assert found.label == UNKNOWN


@pytest.mark.parametrize(("end", "label"), [(TOTAL, WRONG), (TOTAL + 2, UNKNOWN)])
def test_the_number_of_steps_is_judged_where_undisturbed_runs_agree(end, label):
    """Samples are drawn without a seed; ``end``: of a second undisturbed run."""
    undisturbed, again = run(astray(4)), run(astray(4, weights=lambda i: f"u{i}"), end=end)
    found = judged(run(begin=SAVED, end=TOTAL + 4), undisturbed=undisturbed, again=again)
    assert (found.label, [one.kind for one in found.findings]) == (label, ["length"])


def test_where_weights_never_change_a_checkpoint_says_where_it_went_on():
    """The tutorial's constant loss: all steps have equal weights, and an epoch comes twice."""
    drawing = itertools.count()

    def still(index: int, step: Step) -> Step:
        files = {"snapshot.pt": 9} if index and index % 5 == 0 else {}
        same = {"weights": "w", "state": "", "parts": (), "after": "w", "hyper": ()}
        drawn = {"inputs": (f"x {next(drawing)}",), "samples": (), "buffers": {}, "files": files}
        return dataclasses.replace(step, **same, **drawn)

    gangs = {"undisturbed": run(still), "killed": run(still, end=KILLED), "again": run(still)}
    found = judged(run(still, begin=10, end=TOTAL), **gangs)
    assert (found.resumed_after, found.unclear, found.label) == (SAVED, True, WRONG)
    assert found.findings == (Finding("length", 45, facts={"total": TOTAL, "ended": 45}),)


def test_samples_from_random_numbers_that_begin_again_have_another_cure():
    def again(index: int, step: Step) -> Step:
        first = ordinary(index - SAVED)
        step = dataclasses.replace(astray()(index, step), rng=first.rng)
        return dataclasses.replace(step, **of_step(index - SAVED))

    [found] = judged(run(again, begin=SAVED)).findings
    assert (found.kind, found.facts["seed"]) == ("inputs", True)
    assert "begin again from the seed" in report.said(found)
    assert "get_rng_state" in report.cure(found, report.OWN)
    restored = judged(run(samples_from(lambda i: i - SAVED), begin=SAVED)).findings[0]
    assert restored.facts["seed"] is False, "a sampler whose epoch was not set"


def test_only_a_torn_file_is_called_half_written():
    for torn in (True, False):
        [found] = judged((), code=1, torn=torn).findings
        assert ("half written" in report.cure(found, report.OWN)) == torn


def test_a_script_that_repeats_up_to_rounding_resumes_up_to_rounding():
    near = changed(2, gradients=lambda i: f"h{i}", after=lambda i: f"v{i + 1}", norm=2.0000001)
    weights = changed(3, weights=lambda i: f"v{i}")
    undisturbed = run(lambda i, s: weights(i, near(i, s)))
    found = judged(run(begin=SAVED), undisturbed=undisturbed)
    assert (found.label, found.findings) == (ROUNDING, ())


def test_random_numbers_that_were_drawn_come_before_rounding():
    near = changed(rng=lambda i: {"torch": f"q{i}"}, outputs=lambda i: (f"z{i}",), loss=1.0000001)
    assert [one.kind for one in judged(run(near, begin=SAVED)).findings] == ["rng"]
    unused = changed(0, rng={"torch": "r"})
    other = changed(rng={"torch": "q"}, outputs=lambda i: (f"z{i}",), loss=3.0)
    found = judged(run(other, begin=SAVED), undisturbed=run(unused), killed=run(unused, end=KILLED))
    assert [one.kind for one in found.findings] == ["unseen"], "nothing draws them"


def test_a_step_that_not_all_ranks_have_finished_is_not_compared():
    resumed = run(astray(25), begin=SAVED, end=26, world=3)
    whole = (resumed[0], *(dataclasses.replace(one, steps=one.steps[:-1]) for one in resumed[1:]))
    found = judged(whole, undisturbed=run(world=3), killed=run(end=KILLED, world=3), code=1)
    assert [(one.kind, one.step) for one in found.findings] == [("crash", 26)]


def test_a_second_undisturbed_run_clears_the_restart():
    strange = astray(30)
    assert judged(run(strange, begin=SAVED)).label == WRONG
    found = judged(run(strange, begin=SAVED), again=run(astray(25)))
    assert (found.label, found.findings) == (UNKNOWN, ())


def test_steps_of_equal_weights_are_told_apart_by_what_else_is_loaded():
    """A warm-up from lr 0: the weights of the first steps are those of the beginning."""
    still = changed(0, weights=lambda i: "w0" if i < 4 else f"w{i}",
                    after=lambda i: "w0" if i < 3 else f"w{i + 1}")  # fmt: skip
    found = judged(run(still, begin=2), undisturbed=run(still), killed=run(still, end=KILLED))
    assert (found.label, found.resumed_after) == (RIGHT, 2)


def test_weights_of_no_step_are_named():
    half = changed(weights="w?", parts=("a15", "b0"))
    found = judged(run(half, begin=SAVED))
    assert found.resumed_after is None
    assert found.findings[0].facts == {"after": SAVED, "other": ["second"], "count": 2}
    assert "after step 15" in report.said(found.findings[0])
    none = changed(weights="w?", parts=("a?", "b?"))
    assert "no step" in report.said(judged(run(none, begin=SAVED)).findings[0])
    fresh = changed(weights="w?", parts=("a?", "b?"), empty=True)
    assert "no step" in report.said(judged(run(fresh, begin=SAVED)).findings[0]), "plain SGD"
    chance = run(changed(0, weights=lambda i: f"x{i}"))  # as they are made without a seed
    found = judged(run(fresh, begin=SAVED), undisturbed=chance)
    assert found.findings == (Finding("nothing-loaded", 1),)


def test_an_optimizer_that_steps_second_is_not_taken_for_other_samples():
    """Of a GAN the maker was not loaded: its samples differ before its own first step shows why."""

    def gan(index: int, step: Step) -> Step:
        return dataclasses.replace(
            step, optimizer=index % 2, weights=f"{index % 2} w{index // 2}",
            after=f"{index % 2} w{index // 2 + 1}",
        )  # fmt: skip

    def lost(index: int, step: Step) -> Step:
        step = dataclasses.replace(gan(index, step), **follows(index))
        new: dict[str, Any] = {"inputs": (f"made {index}",), "samples": (f"z{index}",)}
        if index % 2:
            new |= {"weights": f"1 v{index}", "state": LOST, "empty": index == SAVED + 2}
        return dataclasses.replace(step, **new)

    found = judged(run(lost, begin=SAVED + 1), undisturbed=run(gan), killed=run(gan, end=KILLED))
    assert [(one.kind, one.step) for one in found.findings[:2]] == [("weights", 18), ("state", 18)]


def test_weights_that_are_changed_between_steps_are_named():
    found = judged(run(astray(20, weights=lambda i: f"v{i}"), begin=SAVED))
    assert [(one.kind, one.step) for one in found.findings] == [("between", 21)]
    assert report.said(found.findings[0])


def test_nothing_kept_a_crash_a_hang_and_no_step_are_told_apart():
    assert judged(run(), kept=False).findings[0].kind == "nothing-kept"
    assert judged((), code=9).findings[0].kind == "crash"
    assert judged(()).findings[0].kind == "no-step"
    assert judged((), silent=True).findings[0].kind == "hang"
    found = judged(run(begin=SAVED, end=20), code=1)
    assert [(one.kind, one.step) for one in found.findings] == [("crash", 21)]


def test_an_evaluation_between_checkpoint_and_kill_is_not_missed():
    before, after = run(), run(begin=SAVED)
    with_more = changed(
        SAVED, inputs=lambda i: ("evaluated", *ordinary(i).inputs),
        outputs=lambda i: ("score", *ordinary(i).outputs),
    )  # fmt: skip
    only_there = tuple(
        dataclasses.replace(one, steps=(*one.steps[:SAVED], run(with_more)[0].steps[SAVED],
                                        *one.steps[SAVED + 1 :]))
        for one in before
    )  # fmt: skip
    killed = tuple(dataclasses.replace(one, steps=one.steps[:KILLED]) for one in only_there)
    assert judged(after, undisturbed=only_there, killed=killed).label == RIGHT


def test_a_rank_that_died_one_step_earlier_is_compared_as_far_as_it_got():
    short = run(end=KILLED, world=3)
    killed = (short[0], dataclasses.replace(short[1], steps=short[1].steps[:-1]), short[2])
    found = judged(run(begin=SAVED, world=3), undisturbed=run(world=3), killed=killed)
    assert (found.label, found.killed_after) == (RIGHT, KILLED - 1)


@pytest.mark.parametrize(
    ("total", "saved", "epoch", "expected"),
    [
        (48, range(5, 48, 5), 12, 17),  # within the second epoch, between two checkpoints
        (48, range(12, 48, 12), 12, 30),  # at the ends of epochs only: within the one that follows
        (48, range(1, 48), 12, 14),  # after each step
        (48, [], 12, 24),  # never
        (48, [13, 24, 29], 12, 38),  # neither the first one nor at an end
        (30, [10, 20], None, 25),  # no epoch ends
        (6, [5], None, 3),  # too late: nothing would follow it
    ],
)
def test_the_kill_comes_within_an_epoch_after_the_first(total, saved, epoch, expected):
    assert samples.kill_after(total, saved, epoch) == expected


def test_checkpoints_are_told_from_logs():
    def at(index: int, step: Step) -> Step:
        files = {"log.txt": 10_000 + index, "small.json": 10}
        if index in (5, 10, 15):
            files |= {f"out/step-{index}/model.pt": 4000}
        return dataclasses.replace(step, files=files)

    found = run(at)[0]
    assert samples.saved_after(dataclasses.replace(found, bytes=4000)) == [5, 10, 15]
    only_log = tuple(dataclasses.replace(one, files={"small.json": 10}) for one in found.steps)
    assert samples.saved_after(dataclasses.replace(found, bytes=4000, steps=only_log)) == []


def test_a_checkpoint_that_a_thread_still_writes_is_waited_for(tmp_path):
    """SIGSTOP would hold the thread as well, and nothing would be there to load."""
    watched, stopped = Watched(tmp_path), threading.Event()

    def writes() -> None:
        (tmp_path / "part").write_bytes(b"12")
        stopped.wait(0.5)
        (tmp_path / "last.pt").write_bytes(b"123")

    writer = threading.Thread(target=writes)
    writer.start()
    assert watched.settle() == {"part": 2, "last.pt": 3}
    writer.join()


def test_a_torn_line_and_a_second_process_of_a_rank_are_no_harm(tmp_path):
    head = '{"rank": 0, "world": 1, "names": ["w"], "more": 1}\n'
    line = '{"weights": "a", "inputs": ["x"], "later": 2}\n'
    (tmp_path / "rank-0.7.jsonl").write_text(head + line * 2 + '{"weights": "b')
    (tmp_path / "rank-0.8.jsonl").write_text(head + line)
    (tmp_path / "rank-1.9.jsonl").write_text("")
    (found,) = Steps(tmp_path).look()
    assert [step.weights for step in found.steps] == ["a", "a"]
    assert found.steps[0].inputs == ("x",)


def test_the_copy_leaves_the_folder_alone(tmp_path, monkeypatch):
    here, work = tmp_path / "here", tmp_path / "here/kept/work"
    for name in ("train.py", "data/x.bin", "runs/old.pt", ".git/HEAD", "__pycache__/t.pyc",
                 ".hidden/x", "env/pyvenv.cfg"):  # fmt: skip
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("here")
    (here / "dangling").symlink_to("nowhere")
    (here / "script").symlink_to("train.py")
    source = folder.Source(here, left_out=["runs"], linked=["data/"])
    for _ in range(2):  # the second time over the first
        source.fill(work)
        names = [".git", ".hidden", "data", "env", "script", "train.py"]
        assert sorted(path.name for path in work.iterdir()) == names
        links = {path.name for path in work.iterdir() if path.is_symlink()}
        assert links == {".git", "data", "env", "script"}
        assert (work / "train.py").read_text() == "here"
        (work / "train.py").write_text("there")
    assert (here / "train.py").read_text() == "here"
    monkeypatch.setattr(folder, "MOST_FILES", 1)
    with pytest.raises(ConfigError, match="--link NAME"):
        source.fill(work)


def test_what_lies_outside_is_linked_beside_the_copy(tmp_path):
    here, root = tmp_path / "a/b/here", tmp_path / "root"
    for name in ("a/b/here/train.py", "a/data/x.bin", "a/b/more/y.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = folder.Source(here, linked=["../../data/", "../more", str(tmp_path / "a/data")])
    source.check()
    for _ in range(2):
        source.fill(root)
    work = source.place(root)
    assert (work / "train.py").read_text() == "a/b/here/train.py"
    assert (work / "../../data/x.bin").read_text() == "a/data/x.bin"
    assert (work / "../more/y.bin").read_text() == "a/b/more/y.bin"
    assert all(path.is_relative_to(root) for path in root.rglob("*"))


@pytest.mark.parametrize(
    ("option", "name"),
    [("linked", "dat"), ("linked", "../nothing"), ("linked", ".."), ("left_out", "runs/old")],
)
def test_what_matches_nothing_is_refused(option, name, tmp_path):
    here = tmp_path / "here"
    (here / "data").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{name}: .* holds no such file"):
        folder.Source(here, **{option: [name]}).check()


#: What of a cure solves this cause, in a loop of one's own.
SOLVES = {
    "nothing-loaded": "load it at the start", "nothing-kept": "every so many steps save",
    "no-step": "load it at the start", "weights": "strict=True", "buffers": "has the buffers",
    "state": "save optimizer.state_dict()", "hyper": "scheduler.state_dict()",
    "inputs": "skip the batches that were trained", "rng": "of each rank", "between": "averages",
    "unseen": "generators", "length": "from which it counts", "crash": "see the end of its output",
    "hang": "--patience", "rounding": "nothing, unless",
}  # fmt: skip


@pytest.mark.parametrize("kind", SOLVES)
def test_a_cure_fits_its_cause_in_the_words_of_every_framework(kind):
    assert SOLVES[kind] in report.cure(Finding(kind), report.OWN)
    for framework in ("accelerate", "lightning", "transformers", "pytorch_lightning"):
        assert report.cure(Finding(kind), framework)
    assert report._CURES.keys() == SOLVES.keys() | {"seed"}


def test_of_several_frameworks_the_outermost_resumes():
    assert report.framework({"accelerate": "1", "transformers": "5"}) == "transformers"
    assert report.framework({}) == report.OWN


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("no.py", "no.py: no such script"),
        ("--nproc 0 own.py", "--nproc=0"),
        ("--kill-after 9 --stop-after 9 own.py", "--kill-after must be less"),
        ("--resume-args ' own.py", "--resume-args"),
        ("--resume-args {newest} own.py", "needs --resume-when"),
        ("--link ../dta own.py", "--link ../dta"),
        ("--seed -1 own.py", "--seed=-1"),
        ("--patience nan own.py", "--patience=nan"),
        ("torchrun own.py", "--nproc N"),
        ("--keep . own.py", "is not empty"),
        ("book.ipynb", "notebook"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    words, complaint, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()
    assert cli.main(["audit", *words.split()]) == 64
    said = capsys.readouterr()
    assert (said.out, complaint in said.err) == ("", True), said.err
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]
