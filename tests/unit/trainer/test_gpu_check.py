"""gpu-check itself: its command line, its verdicts and its page. Nothing is launched here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpjob_tools.chaos.kills import plan_kills
from ddpjob_tools.gpu_check import checks, command, launches
from ddpjob_tools.gpu_check.checks import CHECKS, QUICK, Check
from ddpjob_tools.gpu_check.launches import Launch, Setup
from ddpjob_trainer import cli

#: The first training of check 5, which check 8 shares.
FIRST = "both_resume_fp32"
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
    monkeypatch.setattr(command, "environment", facts)
    report = tmp_path / "report.json"
    assert cli.main(["gpu-check", "--json", str(report)]) == code
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:-1]] == list(verdicts)
    assert [("cure" in line) for line in out[:-1]] == [v in ("WARN", "FAIL") for v in verdicts]
    found = json.loads(report.read_text())
    assert [check["verdict"] for check in found["checks"]] == list(verdicts)
    assert found["environment"]["torch"] == "2.9"


def test_without_a_gpu_or_torch_the_words_for_it_are_told(monkeypatch, capsys, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(launches, "alone", lambda *_: (1, "ImportError: no torch"))
    with pytest.raises(checks.ConfigError, match="ImportError: no torch"):
        checks.environment()
    monkeypatch.setattr(command, "environment", lambda: facts(gpus=[], error="no NVIDIA driver"))
    report = tmp_path / "report.json"
    assert cli.main(["gpu-check", "--json", str(report)]) == 64
    assert "no GPU: no NVIDIA driver" in capsys.readouterr().err
    assert json.loads(report.read_text())["environment"]["error"] == "no NVIDIA driver"


def test_what_cannot_be_is_refused(monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(command, "environment", facts)
    for count, says in (("3", "--nproc 3, but there are 2 GPUs"), ("0", "--nproc")):
        assert cli.main(["gpu-check", "--nproc", count]) == 64
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["gpu-check", "--checks", "1,9"])
    assert "'9' is no check: 1 to 8" in capsys.readouterr().err


def test_quick_runs_the_first_four(monkeypatch):  # type: ignore[no-untyped-def]
    ran = []
    made = [
        Check(c.number, c.name, lambda s, n=c.number: ran.append(n) or iter(())) for c in CHECKS
    ]
    monkeypatch.setattr(command, "CHECKS", made)
    monkeypatch.setattr(command, "environment", facts)
    assert cli.main(["gpu-check", "--quick"]) == 0
    assert tuple(ran) == QUICK == (1, 2, 3, 4)


def setup(tmp_path: Path, *, cuda: bool = True, **ended: Launch) -> Setup:
    """``ended``: launches, by their names with _ for -."""
    launched = {name.replace("_", "-"): launch for name, launch in ended.items()}
    return Setup(2, cuda, tmp_path, facts(), launched)


def launch(*results: dict[str, Any], code: int = 0, output: str = "", place: Path = Path(),
           report: dict[str, Any] | None = None) -> Launch:  # fmt: skip
    return Launch(code, output, list(results), report or {}, place)


def test_what_needs_a_gpu_is_skipped_without_one(tmp_path: Path) -> None:
    for number in (3, 6):
        (finding,) = CHECKS[number - 1].run(setup(tmp_path, cuda=False))
        assert (finding.verdict, finding.measured) == ("SKIP", "means something on a GPU only")


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "spares"), (3, "collectives_1"), (4, "collectives_1"), (6, "collectives_2"), (8, FIRST)],
)
def test_a_launch_that_fails_fails_its_check_with_its_last_words(
    tmp_path: Path, number: int, name: str
) -> None:
    failed = launch(code=1, output="a\n\nCUDA error: boom\n")
    (finding,) = CHECKS[number - 1].run(setup(tmp_path, **{name: failed}))
    assert finding.verdict == "FAIL"
    assert "exit code 1: a | CUDA error: boom" in finding.measured


def test_a_check_that_breaks_is_a_failure_and_not_the_end(tmp_path: Path) -> None:
    (finding,) = CHECKS[1].run(setup(tmp_path, spares=launch({})))
    assert finding.verdict == "FAIL"
    assert "KeyError" in finding.measured


def collected(sha256: str, uuid: str = "", processes: str = "") -> dict[str, Any]:
    return {"sha256": sha256, "uuid": uuid, "processes": list(processes)}


def on(uuids: str, processes: str) -> dict[str, Launch]:
    return {"collectives_1": launch(*(collected("x", uuid, processes) for uuid in uuids))}


def spares(waiting: int, held: int, output: str = "") -> dict[str, Launch]:
    return {"spares": launch({"waiting": waiting, "held": held}, output=output)}


def hang(code: int, **report: Any) -> dict[str, Launch]:
    return {"hang": launch(code=code, report=report)}


def freed(free: int) -> dict[str, Launch]:
    return {"collectives_2": launch(*[{"before": 100, "free": n} for n in (100, free)])}


def lost(*victims: int) -> dict[str, Launch]:
    result = {"kills": [{"victim": one} for one in victims], "restarts": [0, 3, 6], "launches": 2}
    return {FIRST: launch(result)}


def bits(second: str) -> dict[str, Launch]:
    ended = [launch(collected(found), collected(found)) for found in ("x", second)]
    return {"collectives_1": ended[0], "collectives_2": ended[1]}


@pytest.mark.parametrize(
    ("number", "ended", "verdict"),
    [
        (2, spares(3, 0), "PASS"),
        (2, spares(3, 1), "FAIL"),
        (2, spares(0, 0), "FAIL"),
        (2, spares(3, 0, "launcher: no warm spares: an import has opened /dev/kfd\n"), "FAIL"),
        (3, on("ab", "ab"), "PASS"),
        (3, on("aa", "aa"), "FAIL"),  # two on one
        (3, on("ab", "aba"), "FAIL"),  # one has a context on the other's
        (3, on("ab", ""), "WARN"),  # nobody can tell
        (4, bits("x"), "PASS"),
        (4, bits("y"), "FAIL"),
        (7, hang(76, kind="hang", rank=1), "PASS"),
        (7, hang(76, kind="hang", rank=0), "FAIL"),
        (7, hang(75, kind="peerLost", rank=1), "FAIL"),
        (7, hang(0), "FAIL"),
        (6, freed(96), "PASS next round and end within 2.5 s"),
        (6, freed(90), "FAIL next round and end within 2.5 s"),
        (8, lost(1, -1, 0), "PASS 3 restarts, 2 launches"),
        (8, lost(1, -1, 1), "FAIL 3 restarts, 2 launches"),
    ],
)
def test_what_launches_found_is_judged(tmp_path, number, ended, verdict):  # type: ignore[no-untyped-def]
    events = [{"event": name, "time": at} for name, at in (("failure", 5.0), ("end", 7.5))]
    (tmp_path / "events").write_text("".join(json.dumps(one) + "\n" for one in events))
    for one in ended.values():
        object.__setattr__(one, "place", tmp_path)
    (found,) = CHECKS[number - 1].run(setup(tmp_path, **ended))
    expected, _, measured = verdict.partition(" ")
    assert found.verdict == expected
    assert measured in found.measured


@pytest.mark.parametrize("seed", range(9))
def test_chaos_kills_each_rank_when_it_makes_one_kill_more(seed: int) -> None:
    """Check 8 rests on it."""
    kills = plan_kills(seed=seed, count=4, nproc=3, total_steps=26, epoch=21, every=3, points=())
    assert {kill.victim for kill in kills} >= {0, 1, 2}


def test_bits_are_compared_for_every_precision_and_level(monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    asked: list[Sequence[str]] = []

    def complete(command: Sequence[str], _: object) -> tuple[int, str]:
        asked.append(command)
        return int("elastic" in command), "DIFFERENT"

    monkeypatch.setattr(launches, "complete", complete)
    given = setup(tmp_path)
    found = list(CHECKS[4].run(given))
    assert [f.verdict for f in found] == ["PASS", "PASS", "PASS", "FAIL"]
    assert "DIFFERENT" in found[3].measured
    words = {word for command in asked for word in command}
    assert words >= {"fp32", "bf16", "fp16", "resume", "elastic", "both", "transformer"}
    list(CHECKS[4].run(given))
    assert len(asked) == 4, "each once"


def test_what_is_started_belongs_to_no_job(monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("DDPJOB_REPLICA", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    (tmp_path / "show.py").write_text("import os\nprint(sorted(os.environ))\n")
    _, output = launches.complete([sys.executable, str(tmp_path / "show.py")], {})
    assert not {"DDPJOB_REPLICA", "RANK", "MASTER_ADDR"} & set(re.findall(r"'(\w+)'", output))


def test_the_page_names_every_check() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(c.number, c.name) for c in CHECKS]
