"""gpu-check itself: its command line, its verdicts and its page. Nothing is launched here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob_trainer import cli
from ddpjob_trainer.tools.gpu_check import checks, command, launches
from ddpjob_trainer.tools.gpu_check.checks import CHECKS, QUICK, Check
from ddpjob_trainer.tools.gpu_check.launches import Launch, Setup

PAGE = Path(__file__).parents[3] / "docs/guides/gpus.md"
FACTS = {
    "torch": "2.9", "cuda": "13.0", "nccl": "2.27", "driver": "580", "shm_bytes": 1 << 31,
    "gpus": [{"name": "H200", "uuid": str(n), "bytes": 1} for n in range(2)], "error": "",
}  # fmt: skip


def facts(**more: Any) -> dict[str, Any]:
    return {**FACTS, **more}


def told(*verdicts: str) -> tuple[Check, ...]:
    """Checks that have found this."""

    def look(setup: Setup) -> Iterator[Any]:
        yield from ((verdict, "measured", "cure") for verdict in verdicts)

    return (Check(1, "one", look),)


@pytest.mark.parametrize(
    ("verdicts", "code"), [(("PASS", "WARN", "SKIP"), 0), (("PASS", "FAIL", "PASS"), 1), ((), 0)]
)
def test_only_a_failure_fails(monkeypatch, capsys, tmp_path, verdicts, code):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(command, "CHECKS", told(*verdicts))
    monkeypatch.setattr(command, "environment", lambda _: facts())
    report = tmp_path / "report.json"
    assert cli.main(["gpu-check", "--json", str(report)]) == code
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:-1]] == list(verdicts)
    assert [("cure" in line) for line in out[:-1]] == [v in ("WARN", "FAIL") for v in verdicts]
    found = json.loads(report.read_text())
    assert [check["verdict"] for check in found["checks"]] == list(verdicts)
    assert found["environment"]["torch"] == "2.9"


def test_without_a_gpu_the_drivers_words_are_told(monkeypatch, capsys, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(command, "environment", lambda _: facts(gpus=[], error="no NVIDIA driver"))
    report = tmp_path / "report.json"
    assert cli.main(["gpu-check", "--json", str(report)]) == 64
    assert "no GPU: no NVIDIA driver" in capsys.readouterr().err
    assert json.loads(report.read_text())["environment"]["error"] == "no NVIDIA driver"


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--nproc", "3"], "--nproc 3, but there are 2 GPUs"), (["--nproc", "0"], "--nproc")],
)
def test_what_cannot_be_is_refused(monkeypatch, capsys, words, says):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(command, "environment", lambda _: facts())
    assert cli.main(["gpu-check", *words]) == 64
    assert says in capsys.readouterr().err


def test_a_check_that_does_not_exist_is_refused(capsys):  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        cli.main(["gpu-check", "--checks", "1,12"])
    assert "'12' is no check: 1 to 11" in capsys.readouterr().err


def test_quick_runs_the_first_four(monkeypatch):  # type: ignore[no-untyped-def]
    ran = []
    made = [
        Check(c.number, c.name, lambda s, n=c.number: ran.append(n) or iter(())) for c in CHECKS
    ]
    monkeypatch.setattr(command, "CHECKS", made)
    monkeypatch.setattr(command, "environment", lambda _: facts())
    assert cli.main(["gpu-check", "--quick"]) == 0
    assert tuple(ran) == QUICK == (1, 2, 3, 4)


def setup(tmp_path: Path, *, cuda: bool = True) -> Setup:
    return Setup(2, cuda, tmp_path, facts())


def answer(monkeypatch: pytest.MonkeyPatch, *found: Launch) -> None:
    """Launches end so, one after another."""
    waiting = list(found)
    monkeypatch.setattr(launches, "run", lambda *_, **__: waiting.pop(0))


def launch(*results: dict[str, Any], code: int = 0, **more: Any) -> Launch:
    return Launch(code, more.pop("output", ""), list(results), more.pop("report", {}), Path())


def verdicts(number: int, given: Setup) -> list[str]:
    return [finding.verdict for finding in CHECKS[number - 1].run(given)]


def test_what_needs_a_gpu_is_skipped_without_one(tmp_path: Path) -> None:
    for number in (3, 6, 11):
        (finding,) = CHECKS[number - 1].run(setup(tmp_path, cuda=False))
        assert (finding.verdict, finding.measured) == ("SKIP", "means something on a GPU only")


@pytest.mark.parametrize("number", [2, 3, 4, 6, 8, 9, 10, 11])
def test_a_launch_that_fails_fails_its_check_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    answer(monkeypatch, *[launch(code=1, output="a\n\nCUDA error: boom\n")] * 2)
    (finding,) = CHECKS[number - 1].run(setup(tmp_path))
    assert finding.verdict == "FAIL"
    assert "exit code 1: a | CUDA error: boom" in finding.measured


def test_a_check_that_breaks_is_a_failure_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer(monkeypatch, launch({}))
    (finding,) = CHECKS[1].run(setup(tmp_path))
    assert finding.verdict == "FAIL"
    assert "KeyError" in finding.measured


def collected(sha256: str, uuid: str = "", processes: tuple[str, ...] = ()) -> dict[str, Any]:
    seconds = {"1024": 1e-4}
    return {"sha256": sha256, "uuid": uuid, "processes": list(processes), "init_seconds": 1.0,
            "seconds": seconds}  # fmt: skip


@pytest.mark.parametrize(
    ("uuids", "processes", "verdict"),
    [
        (("a", "b"), ("a", "b"), "PASS"),
        (("a", "a"), ("a", "a"), "FAIL"),  # two on one
        (("a", "b"), ("a", "b", "a"), "FAIL"),  # one has a context on the other's
        (("a", "b"), (), "WARN"),  # nobody can tell
    ],
)
def test_one_process_per_gpu(monkeypatch, tmp_path, uuids, processes, verdict):  # type: ignore[no-untyped-def]
    answer(monkeypatch, launch(*(collected("x", uuid, processes) for uuid in uuids)))
    assert verdicts(3, setup(tmp_path)) == [verdict]


def test_other_bits_in_another_launch_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same, other = collected("x"), collected("y")
    answer(monkeypatch, launch(same, same), launch(same, same))
    assert verdicts(4, setup(tmp_path)) == ["PASS", "PASS"]
    answer(monkeypatch, launch(same, same), launch(other, other))
    assert verdicts(4, setup(tmp_path))[0] == "FAIL"


@pytest.mark.parametrize(
    ("waiting", "held", "output", "verdict"),
    [
        (3, 0, "", "PASS"),
        (3, 1, "", "FAIL"),
        (0, 0, "", "FAIL"),
        (3, 0, "launcher: no warm spares: an import has opened /dev/nvidia-uvm\n", "FAIL"),
    ],
)
def test_spares_that_hold_a_gpu(monkeypatch, tmp_path, waiting, held, output, verdict):  # type: ignore[no-untyped-def]
    answer(monkeypatch, launch({"waiting": waiting, "held": held}, output=output))
    assert verdicts(2, setup(tmp_path)) == [verdict]


@pytest.mark.parametrize(
    ("report", "code", "verdict"),
    [
        ({"kind": "hang", "rank": 1}, 76, "PASS"),
        ({"kind": "hang", "rank": 0}, 76, "FAIL"),
        ({"kind": "peerLost", "rank": 1}, 75, "FAIL"),
        ({}, 0, "FAIL"),
    ],
)
def test_who_hangs(monkeypatch, tmp_path, report, code, verdict):  # type: ignore[no-untyped-def]
    answer(monkeypatch, launch(code=code, report=report))
    assert verdicts(7, setup(tmp_path)) == [verdict]


@pytest.mark.parametrize(("syncs", "peak", "expected"), [
    (1, 100, ["PASS", "PASS", "PASS", "PASS"]), (2, 1000, ["PASS", "WARN", "WARN", "WARN"]),
])  # fmt: skip
def test_speed_and_memory_beside_plain_ddp(monkeypatch, tmp_path, syncs, peak, expected):  # type: ignore[no-untyped-def]
    """What the first steps wait for, as they warm up, is not counted."""
    plain = {"seconds": [0.1] * 20, "syncs": [50] * 20, "peaks": [100] * 20}
    waits = [500 + syncs * step for step in range(20)]
    ours = {**plain, "syncs": waits, "peaks": [peak] * 20}
    answer(monkeypatch, launch(plain), launch(ours))
    found = verdicts(10, setup(tmp_path))
    answer(monkeypatch, launch(plain), launch(ours))
    assert found + verdicts(11, setup(tmp_path)) == expected
    answer(monkeypatch, launch(plain), launch(ours))
    assert verdicts(10, setup(tmp_path, cuda=False)) == ["PASS", "SKIP"]


def test_checks_share_the_launches_that_they_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU nearly all the time goes into starting processes."""
    given, timed = setup(tmp_path), {"seconds": [0.1] * 20, "syncs": [0] * 20, "peaks": [1] * 20}
    same = launch(collected("x", "a", ("a", "b")), collected("x", "b"))
    answer(monkeypatch, same, same, launch(timed), launch(timed))
    found = [verdict for number in (3, 4, 10, 11) for verdict in verdicts(number, given)]
    assert set(found) == {"PASS"}


def test_bits_are_compared_for_every_model_level_and_precision(monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    asked = []

    def chaos(_: Setup, *words: str, kills: int) -> Launch:
        asked.append(words)
        return launch(code=int("fp16" in words), output="DIFFERENT")

    monkeypatch.setattr(launches, "chaos", chaos)
    found = list(CHECKS[4].run(setup(tmp_path)))
    assert len(set(asked)) == len(found) == 9
    assert [f.verdict for f in found] == ["PASS", "PASS", "FAIL"] * 3
    assert "DIFFERENT" in found[2].measured


def test_what_is_started_belongs_to_no_job(monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("DDPJOB_REPLICA", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    (tmp_path / "show.py").write_text("import os\nprint(sorted(os.environ))\n")
    _, output = launches._complete([sys.executable, str(tmp_path / "show.py")], {})
    assert not {"DDPJOB_REPLICA", "RANK", "MASTER_ADDR"} & set(re.findall(r"'(\w+)'", output))


def test_the_page_names_every_check() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(c.number, c.name) for c in CHECKS]


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(launches, "alone", lambda *_: (1, "ImportError: no torch"))
    with pytest.raises(checks.ConfigError, match="ImportError: no torch"):
        checks.environment(tmp_path)


def test_a_host_that_is_behind_its_gpu_for_one_step_is_no_stall() -> None:
    """At a snapshot it waits for what it was ahead by; what the copy takes is waited for later."""
    seconds = [5.0, *[0.1] * 60]
    seconds[19], seconds[20] = 0.2, 0.0
    seconds[39], seconds[40], seconds[41] = 0.2, 0.0, 0.13
    usual, held = checks.stall(seconds, 20)
    assert usual == 0.1
    assert held == pytest.approx(0.03 / 2)
    assert checks.stall([0.1] * 61, 20)[1] == 0


def test_what_a_killed_process_gave_back_is_told_from_what_was_never_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = {"failure": {"time": 1.0}, "end": {"time": 3.0}}
    monkeypatch.setattr(checks, "_event", lambda _, name: times[name])
    for free, verdict in ((70, "PASS"), (40, "FAIL")):
        answer(monkeypatch, launch({"free": 70, "before": 70}, {"free": free, "before": 70}))
        assert verdicts(6, setup(tmp_path)) == [verdict, "PASS"]
