"""gpu-check itself: its command line, its verdicts and its page. Nothing is launched here."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpjob_tools import cli, gpu_check
from ddpjob_tools.gpu_check import CHECKS, QUICK, Check, Launch, Setup, machine
from ddpjob_trainer.errors import ConfigError

#: The first training of check 5, which check 8 shares.
FIRST = "both_resume_fp32"
PAGE = Path(__file__).parents[3] / "docs/guides/gpus.md"
FACTS: dict[str, Any] = {
    "torch": "2.9", "cuda": "13.0", "nccl": "2.27", "driver": "580", "shm_bytes": 1 << 31,
    "gpus": [{"name": "H200", "uuid": str(n), "bytes": 1} for n in range(2)], "error": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "machine", lambda _: FACTS)


@pytest.mark.parametrize(
    ("verdicts", "code"), [(("PASS", "WARN", "SKIP"), 0), (("PASS", "FAIL", "PASS"), 1), ((), 0)]
)
def test_only_a_failure_fails(monkeypatch, capsys, tmp_path, verdicts, code):
    found = [(verdict, "measured", "cure") for verdict in verdicts]
    monkeypatch.setattr(gpu_check, "CHECKS", [Check(1, "one", lambda setup: iter(found))])
    report = tmp_path / "report.json"
    assert cli.main(["gpu-check", "--json", str(report)]) == code
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:-1]] == list(verdicts)
    assert [("cure" in line) for line in out[:-1]] == [v in ("WARN", "FAIL") for v in verdicts]
    told = json.loads(report.read_text())
    assert [check["verdict"] for check in told["checks"]] == list(verdicts)
    assert told["environment"]["torch"] == "2.9"


def test_what_cannot_be_is_refused(monkeypatch, capsys, tmp_path):
    for nproc, says in (("3", "--nproc 3, but there are 2 GPUs"), ("0", "--nproc")):
        assert cli.main(["gpu-check", "--nproc", nproc]) == 64
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["gpu-check", "--checks", "1,9"])
    assert "'9' is no check: 1 to 8" in capsys.readouterr().err
    none = {**FACTS, "gpus": [], "error": "no NVIDIA driver"}
    monkeypatch.setattr(gpu_check, "machine", lambda _: none)
    report = tmp_path / "report.json"
    assert cli.main(["gpu-check", "--json", str(report)]) == 64
    assert "no GPU: no NVIDIA driver" in capsys.readouterr().err
    assert json.loads(report.read_text())["environment"]["error"] == "no NVIDIA driver"
    monkeypatch.setattr(gpu_check, "Run", started([], "ImportError: no torch"))
    with pytest.raises(ConfigError, match="ImportError: no torch"):
        machine(tmp_path)


def test_quick_runs_the_first_four(monkeypatch):
    ran = []
    made = [
        Check(c.number, c.name, lambda s, n=c.number: ran.append(n) or iter(())) for c in CHECKS
    ]
    monkeypatch.setattr(gpu_check, "CHECKS", made)
    assert cli.main(["gpu-check", "--quick"]) == 0
    assert tuple(ran) == QUICK == (1, 2, 3, 4)


def started(asked: list[Sequence[str]], output: str) -> type:
    """Stand for a Run that has ended as soon as it has started: elastic fails."""

    class Ended:
        def __init__(self, words: Sequence[str], _: object, log: Path) -> None:
            asked.append(words)
            self.log, self.words = log, words
            self.exit_code: int | None = None

        def start(self) -> None:
            self.log.write_text(output)
            self.exit_code = int("elastic" in self.words)

        def running(self) -> bool:
            return False

    return Ended


def setup(tmp_path: Path, *, cuda: bool = True, **ended: Launch) -> Setup:
    launched = {name.replace("_", "-"): launch for name, launch in ended.items()}
    return Setup(2, cuda, tmp_path, FACTS, launched)


def launch(
    *results: dict[str, Any], code: int = 0, output: str = "", report: dict[str, Any] | None = None
) -> Launch:
    return Launch(code, output, list(results), report or {}, Path())


def collected(*sha256: str, uuids: Sequence[str] = "ab", processes: Sequence[str] = ()) -> Launch:
    found = zip(sha256, uuids, strict=True)
    return launch(
        *({"sha256": one, "uuid": uuid, "processes": list(processes)} for one, uuid in found)
    )


def waiting(count: int, held: int, output: str = "") -> Launch:
    return launch({"waiting": count, "held": held}, output=output)


def hung(code: int, **report: Any) -> Launch:
    return launch(code=code, report=report)


def killed(*victims: int) -> Launch:
    kills = [{"victim": one} for one in victims]
    return launch({"kills": kills, "restarts": [0, 3, 6], "launches": 2})


def free(percent: int) -> Launch:
    return launch(*({"before": 100, "free": n} for n in (100, percent)))


FAILED = launch(code=1, output="a\n\nCUDA error: boom\n")
LAST_WORDS = "exit code 1: a | CUDA error: boom"
OPENED = "launcher: no warm spares: an import has opened /dev/nvidia-uvm\n"


@pytest.mark.parametrize(
    ("number", "ended", "verdict", "says"),
    [
        (2, {"spares": FAILED}, "FAIL", LAST_WORDS),
        (3, {"collectives_1": FAILED}, "FAIL", LAST_WORDS),
        (4, {"collectives_1": FAILED}, "FAIL", LAST_WORDS),
        (6, {"collectives_2": FAILED}, "FAIL", LAST_WORDS),
        (8, {FIRST: FAILED}, "FAIL", LAST_WORDS),
        # A check that breaks is a failure, not the end.
        (2, {"spares": launch({})}, "FAIL", "KeyError"),
        (3, {"cuda": False}, "SKIP", "means something on a GPU only"),
        (6, {"cuda": False}, "SKIP", "means something on a GPU only"),
        (2, {"spares": waiting(3, 0)}, "PASS", ""),
        (2, {"spares": waiting(3, 1)}, "FAIL", ""),
        (2, {"spares": waiting(0, 0)}, "FAIL", ""),
        (2, {"spares": waiting(3, 0, OPENED)}, "FAIL", ""),
        (3, {"collectives_1": collected("x", "x", processes="ab")}, "PASS", ""),
        # Two on one GPU; one with a context on the other's; nobody can tell.
        (3, {"collectives_1": collected("x", "x", uuids="aa", processes="aa")}, "FAIL", ""),
        (3, {"collectives_1": collected("x", "x", processes="aba")}, "FAIL", ""),
        (3, {"collectives_1": collected("x", "x")}, "WARN", ""),
        (4, {f"collectives_{n}": collected(x, x) for n, x in ((1, "x"), (2, "x"))}, "PASS", ""),
        (4, {f"collectives_{n}": collected(x, x) for n, x in ((1, "x"), (2, "y"))}, "FAIL", ""),
        # What a killed process gives back.
        (6, {"collectives_2": free(96)}, "PASS", "next round and end within 2.5 s"),
        (6, {"collectives_2": free(90)}, "FAIL", "next round and end within 2.5 s"),
        (7, {"hang": hung(76, kind="hang", rank=1)}, "PASS", ""),
        (7, {"hang": hung(76, kind="hang", rank=0)}, "FAIL", ""),
        (7, {"hang": hung(75, kind="peerLost", rank=1)}, "FAIL", ""),
        (7, {"hang": hung(0)}, "FAIL", ""),
        (8, {FIRST: killed(1, -1, 0)}, "PASS", "3 restarts, 2 launches"),
        (8, {FIRST: killed(1, -1, 1)}, "FAIL", "3 restarts, 2 launches"),
    ],
)
def test_what_a_check_finds(tmp_path, monkeypatch, number, ended, verdict, says):
    monkeypatch.chdir(tmp_path)  # the place of each launch
    events = [{"event": name, "time": at} for name, at in (("failure", 5.0), ("end", 7.5))]
    Path("events").write_text("".join(json.dumps(one) + "\n" for one in events))
    (finding,) = CHECKS[number - 1].run(setup(tmp_path, **ended))
    assert finding.verdict == verdict
    assert says in finding.measured


def test_the_page_names_every_check():
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(c.number, c.name) for c in CHECKS]
