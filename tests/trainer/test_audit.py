"""`ddpjob audit` on loops of many kinds, as users start it: right ones and wrong ones."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.audits import Audited, audited, command, environment
from support.patience import PATIENCE, wait_for
from support.tiers import some_in_gate

#: Loops that are right: audit must not say otherwise. Arguments of audit, the script, its own.
RIGHT: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "all is saved": ((), "own.py", ()),
    "at the ends of epochs": ((), "own.py", ("--every", "12")),
    "two optimizers": ((), "gan.py", ()),
    "strange parts": ((), "strange.py", ()),
    "our library": (("--nproc", "3"), "with_ddpjob.py", ()),
}
#: Mistakes of own.py: what is found, from which step on. It is killed in its second epoch.
WRONG: dict[str, tuple[list[tuple[str, int]], dict[str, Any]]] = {
    "model-only": ([("state", 16), ("hyper", 16)], {"empty": True}),
    "no-scheduler": ([("hyper", 22)], {}),
    "epoch-again": ([("inputs", 16), ("length", 51)], {"place": "begins", "count": 3}),
    "skips-more": ([("inputs", 16)], {"place": "skipped", "count": 2}),
    "no-set-epoch": ([("inputs", 16)], {"place": "earlier", "step": 4, "from": 1}),
    "unseeded-order": ([("inputs", 16)], {"place": "shuffled", "again": 15}),
    "no-rng": ([("rng", 16)], {}),
    "no-buffers": ([("buffers", 16)], {}),
    "half-model": ([("weights", 16)], {"other": ["4.weight", "4.bias"]}),
    "no-load": ([("nothing-loaded", 1)], {}),
    "no-save": ([("nothing-kept", 1)], {}),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_called_right(name: str, tmp_path: Path):
    options, script, words = RIGHT[name]
    found = audited(tmp_path, script, *words, options=options)
    assert (found.code, found.result.get("verdict")) == (0, "right"), found.out
    assert found.result["final_weights_equal"] is True
    epoch = found.result["epoch_steps"]
    assert found.result["killed_after"] > epoch, "in the second epoch or later"
    assert found.result["killed_after"] % epoch > 0, "not at its end"


@pytest.mark.parametrize("mistake", some_in_gate(WRONG, "epoch-again"))
def test_a_wrong_loop_is_told_its_mistake_and_the_first_step(mistake: str, tmp_path: Path):
    kinds, facts = WRONG[mistake]
    found = audited(tmp_path, "own.py", "--mistake", mistake)
    assert (found.code, found.kinds[: len(kinds)]) == (1, kinds), found.out
    assert found.facts.items() >= facts.items()
    if kinds[0][1] > 1:
        assert (found.result["killed_after"], found.result["resumed_after"]) in (
            (17, 15), (17, None),
        ), found.out  # fmt: skip
    assert "WRONG" in found.out
    assert "cure: " in found.out


@pytest.mark.tier("all")
@pytest.mark.parametrize(("part", "kind"), [("maker", "weights"), ("second", "state")])
def test_of_two_models_the_one_that_was_not_loaded_is_named(part: str, kind: str, tmp_path: Path):
    """Its samples differ before its optimizer's first step shows why."""
    found = audited(tmp_path, "gan.py", part)
    assert (found.code, found.kinds[0]) == (1, (kind, 18)), found.out


@pytest.mark.tier("all")
def test_a_loop_without_a_seed_is_not_judged_but_told_what_to_seed(tmp_path: Path):
    found = audited(tmp_path, "own.py", "--mistake", "no-seed")
    assert (found.code, found.result["verdict"]) == (3, "unknown"), found.out
    assert "torch.manual_seed" in found.out


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("mistake", "kind"), [("none", "rounding"), ("no-skip", "inputs"), ("rank-0-rng", "rng")]
)
def test_of_plain_ddp_the_order_of_buckets_is_told_from_mistakes(
    mistake: str, kind: str, tmp_path: Path
):
    """Three ranks and buckets: after a restart their sums are rounded otherwise, which is right."""
    found = audited(tmp_path, "parallel.py", "--mistake", mistake, options=("--nproc", "3"))
    assert found.kinds[0] == (kind, 16), found.out
    assert found.code == (0 if kind == "rounding" else 1)
    if kind == "rng":
        assert found.result["findings"][0]["ranks"] == [1, 2]


def odd(tmp_path: Path, text: str, *words: str, options: tuple[str, ...] = ()) -> Audited:
    """Audit a loop that begins with some lines more, or ends so where they say {LOOP}."""
    from support import audits

    loops = tmp_path / "loops"
    loops.mkdir()
    loop = (audits.LOOPS / "own.py").read_text()
    (loops / "odd.py").write_text(text.replace("{LOOP}", loop) if "{LOOP}" in text else text + loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "LOOPS", loops)
        return audited(tmp_path, "odd.py", *words, options=options)


ODD: dict[str, tuple[str, int, str]] = {
    "no step": ("print('hello'); raise SystemExit\n", 3, "no step"),
    "fails by itself": ("raise SystemExit(5)\n", 3, "exit code 5"),
    "reads stdin": ("input()\n", 3, "EOFError"),
    "outside": (
        "import sys, tempfile; sys.argv += ['--out', tempfile.gettempdir() + '/kept']\n", 3,
        "outside of its working directory",
    ),
    "os._exit, SIGTERM, much output": (
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x' * 5000000)\n"
        "{LOOP}\nimport os; os._exit(0)\n"), 0, "RIGHT",
    ),
    "forks": (
        "import os, sys\npid = os.fork()\nif pid: os._exit(os.waitpid(pid, 0)[1] >> 8)\n", 0,
        "RIGHT",
    ),
    "half a checkpoint": (
        ("import os, torch\nold = torch.save\n"
        "def save(kept, path):\n    old(kept, path); os.truncate(path, 100)\n"
        "torch.save = save\n"), 1, "failed with exit code 1",
    ),
    "crashes when started again": (
        "import os\nif os.path.exists('checkpoints'): os.kill(os.getpid(), 9)\n", 1,
        "exit code 137",
    ),
    "hangs when started again": (
        "import os, time\nwhile os.path.exists('checkpoints'): time.sleep(0.01)\n", 1,
        "made no further step",
    ),
    "another end": (
        "import os, sys\nif os.path.exists('checkpoints'): sys.argv += ['--epochs', '3']\n", 1,
        "ended after step 36",
    ),
}  # fmt: skip


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", ODD)
def test_an_odd_script_gets_a_clear_word(name: str, tmp_path: Path):
    text, code, word = ODD[name]
    options = ("--patience", "30") if name.startswith("hangs") else ()
    found = odd(tmp_path, text, options=options)
    assert found.code == code, found.out
    assert word in found.out


@pytest.mark.tier("all")
def test_resume_args_kill_after_and_stop_after_are_taken(tmp_path: Path):
    text = "import os, sys\nif '--resume' not in sys.argv: os.system('rm -rf checkpoints')\n"
    given = ("--resume-args", "--resume", "--kill-after", "28", "--stop-after", "40")
    found = odd(tmp_path, text, options=given)
    assert found.code == 0, found.out
    named = ("killed_after", "resumed_after", "total_steps")
    assert [found.result[name] for name in named] == [28, 25, 40]


#: Goes on only from the file that --from names; its checkpoints have steps in their names.
NAMED = """
import glob, os, shutil, sys
made = len(glob.glob("checkpoints/step-*.pt"))
if "--from" in sys.argv:
    at = sys.argv.index("--from")
    shutil.copy(sys.argv[at + 1], "checkpoints/last.pt")
    del sys.argv[at : at + 2]
elif os.path.exists("checkpoints/last.pt"):
    os.remove("checkpoints/last.pt")
usual = os.replace
def replace(new, path):
    global made
    made += 1
    usual(new, path)
    shutil.copy(path, f"checkpoints/step-{5 * made}.pt")
os.replace = replace
"""


def test_the_newest_checkpoint_at_the_kill_is_named_to_the_second_start(tmp_path: Path):
    given = ("--resume-args", "--from {newest}", "--resume-when", "checkpoints/step-*.pt")
    found = odd(tmp_path, NAMED, options=given)
    assert (found.code, found.result["resumed_after"]) == (0, 15), found.out
    assert "This holds with --resume-args '--from {newest}' --resume-when" in found.out


@pytest.mark.tier("all")
def test_a_checkpoint_that_comes_after_the_kill_is_no_mistake(tmp_path: Path):
    found = odd(tmp_path, NAMED, options=("--resume-args", "--from checkpoints/step-40.pt"))
    assert found.code == 64, found.out
    assert "checkpoints/step-40.pt: not there after the kill at step 17" in found.out
    assert "checkpoints/step-15.pt" in found.out


@pytest.mark.tier("all")
def test_a_loop_without_a_seed_gets_one_and_is_judged(tmp_path: Path):
    found = audited(tmp_path, "own.py", "--mistake", "no-seed", options=("--seed", "3"))
    assert (found.code, found.result["verdict"]) == (0, "right"), found.out


@pytest.mark.tier("all")
def test_data_beside_the_folder_is_linked_and_asked_for(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("x")
    found = odd(tmp_path, "open('../data/x')\n")
    assert (found.code, "../data/x is outside of the folder" in found.out) == (3, True), found.out


@pytest.mark.tier("all")
def test_processes_that_join_no_group_are_told(tmp_path: Path):
    found = audited(tmp_path, "own.py", options=("--nproc", "2", "--stop-after", "20"))
    assert "each process trained by itself" in found.out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--", "no.py"], "no.py: no such script"),
        (["--nproc", "0", "--", "own.py"], "--nproc=0"),
        (["--kill-after", "9", "--stop-after", "9", "--", "own.py"], "--kill-after must be less"),
        (["--resume-args", "'", "--", "own.py"], "--resume-args"),
        (["--resume-args", "{newest}", "--", "own.py"], "needs --resume-when"),
        (["--link", "../dta", "--", "own.py"], "--link ../dta"),
        (["--seed", "-1", "--", "own.py"], "--seed=-1"),
        (["--", "torchrun", "own.py"], "--nproc N"),
        (["--keep", ".", "--", "own.py"], "is not empty"),
        (["--", "book.ipynb"], "notebook"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    words: list[str], complaint: str, tmp_path: Path
):
    given = [*command(tmp_path, "own.py")[:4], *words]
    done = subprocess.run(
        given, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (64, "")
    assert complaint in done.stderr


@pytest.mark.tier("all")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_audit_leaves_nobody_and_no_file(signum: int, tmp_path: Path):
    folder = tmp_path / "here"
    folder.mkdir()
    begun, temporary = tmp_path / "begun", tmp_path / "tmp"
    temporary.mkdir()
    text = f"import os\nopen({str(begun)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    with subprocess.Popen(
        command(folder, "own.py", "--epochs", "100000"), cwd=folder, env=environment(temporary),
        stderr=subprocess.PIPE, text=True,
    ) as audit:  # fmt: skip
        (folder / "own.py").write_text(text + (folder / "own.py").read_text())
        wait_for(lambda: begun.exists() and begun.read_text().endswith(" "), "it has begun")
        audit.send_signal(signum)
        _, said = audit.communicate(timeout=PATIENCE)
    assert audit.returncode == 128 + signum, said
    for pid in map(int, begun.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(temporary.iterdir()) == []
    assert [path.name for path in folder.iterdir()] == ["own.py"]
