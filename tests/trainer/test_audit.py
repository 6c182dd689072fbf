"""`ddpjob audit` on loops of many kinds, as users start it: right ones and wrong ones."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.audits import Audited, audited, command, environment
from support.patience import PATIENCE, wait_for

#: Loops that are right: audit must not say otherwise. Arguments of audit, and the script.
RIGHT: dict[str, tuple[tuple[str, ...], str]] = {
    "two optimizers": ((), "gan.py"),
    "strange parts": ((), "strange.py"),
    "our library": (("--nproc", "3"), "with_ddpjob.py"),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_called_right(name, tmp_path):
    options, script = RIGHT[name]
    found = audited(tmp_path, script, options=options)
    assert (found.code, found.result.get("verdict")) == (0, "right"), found.out
    assert found.result["final_weights_equal"] is True
    epoch = found.result["epoch_steps"]
    assert found.result["killed_after"] > epoch, "in the second epoch or later"
    assert found.result["killed_after"] % epoch > 0, "not at its end"


def test_mistakes_of_a_loop_are_named_with_their_step_and_cure(tmp_path):
    """It is killed in its second epoch."""
    mistakes = "no-buffers,no-optimizer,no-scheduler,unseeded-order"
    found = audited(tmp_path, "own.py", "--mistakes", mistakes)
    kinds = [("buffers", 16), ("state", 16), ("hyper", 16), ("inputs", 16)]
    assert (found.code, found.kinds) == (1, kinds), found.out
    assert (
        found.result["findings"][-1]["facts"].items() >= {"place": "shuffled", "again": 15}.items()
    )
    assert found.result["killed_after"] == 17
    assert "WRONG" in found.out
    assert found.out.count("cure: ") == len(kinds)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("mistake", "kind", "ranks"), [("none", "rounding", None), ("rank-0-rng", "rng", [1, 2])]
)
def test_of_plain_ddp_the_order_of_buckets_is_no_mistake(mistake, kind, ranks, tmp_path):
    """Three ranks and buckets: after a restart their sums are rounded otherwise, which is right."""
    found = audited(tmp_path, "parallel.py", "--mistake", mistake, options=("--nproc", "3"))
    assert found.kinds[0] == (kind, 16), found.out
    assert found.code == (0 if kind == "rounding" else 1)
    assert ranks in (None, found.result["findings"][0]["ranks"])


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
    "reads stdin": ("input()\n", 3, "EOFError"),
    "data beside its folder": ("open('../data/x')\n", 3, "--link PATH for what it reads"),
    "checkpoints outside": (
        "import sys, tempfile; sys.argv += ['--out', tempfile.gettempdir() + '/kept']\n", 3,
        "outside of its working directory",
    ),
    "forks, ignores SIGTERM, prints much, os._exit": (
        ("import os, signal\nif pid := os.fork(): os._exit(os.waitpid(pid, 0)[1] >> 8)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x' * 5000000)\n"
        "{LOOP}\nos._exit(0)\n"), 0, "RIGHT",
    ),
    "hangs when started again": (
        "import os, time\nwhile os.path.exists('checkpoints'): time.sleep(0.01)\n", 1,
        "made no further step",
    ),
}  # fmt: skip


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", ODD)
def test_an_odd_script_gets_a_clear_word(name, tmp_path):
    text, code, word = ODD[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("x")
    options = ("--patience", "30") if name.startswith("hangs") else ()
    found = odd(tmp_path, text, options=options)
    assert found.code == code, found.out
    assert word in found.out


@pytest.mark.tier("all")
def test_seed_resume_args_kill_after_and_stop_after_are_taken(tmp_path):
    text = "import os, sys\nif '--resume' not in sys.argv: os.system('rm -rf checkpoints')\n"
    given = ("--resume-args", "--resume", "--kill-after", "28", "--stop-after", "40")
    found = odd(tmp_path, text, "--mistakes", "no-seed", options=(*given, "--seed", "3"))
    assert (found.code, found.result["verdict"]) == (0, "right"), found.out
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


def test_the_newest_checkpoint_at_the_kill_is_named_to_the_second_start(tmp_path):
    given = ("--resume-args", "--from {newest}", "--resume-when", "checkpoints/step-*.pt")
    found = odd(tmp_path, NAMED, options=given)
    assert (found.code, found.result["resumed_after"]) == (0, 15), found.out
    assert "This holds with --resume-args '--from {newest}' --resume-when" in found.out


@pytest.mark.tier("all")
def test_a_checkpoint_that_comes_after_the_kill_is_no_mistake(tmp_path):
    found = odd(tmp_path, NAMED, options=("--resume-args", "--from checkpoints/step-40.pt"))
    assert found.code == 64, found.out
    assert "checkpoints/step-40.pt: not there after the kill at step 17" in found.out
    assert "checkpoints/step-15.pt" in found.out


@pytest.mark.tier("all")
def test_processes_that_join_no_group_are_told(tmp_path):
    found = audited(tmp_path, "own.py", options=("--nproc", "2", "--stop-after", "20"))
    assert "each process trained by itself" in found.out


@pytest.mark.tier("all")
def test_an_interrupted_audit_leaves_nobody_and_no_file(tmp_path):
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
        audit.send_signal(signal.SIGTERM)
        _, said = audit.communicate(timeout=PATIENCE)
    assert audit.returncode == 128 + signal.SIGTERM, said
    for pid in map(int, begun.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert list(temporary.iterdir()) == []
    assert [path.name for path in folder.iterdir()] == ["own.py"]
