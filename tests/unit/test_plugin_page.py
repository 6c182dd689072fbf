"""`kubectl ddp why --html`: a job's life as one page, whatever is known of it."""

import io
import json
import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pytest

from kubectl_ddp import cli, page
from kubectl_ddp.commands import life
from kubectl_ddp.drawing import Failed, Line, Round
from kubectl_ddp.page import Story
from support import plugin

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>\"' ]]> &amp; \x1b[2J\x00 \ufffe \ud800 https://evil.example/x"
SVG = "{http://www.w3.org/1999/xhtml}"


def at(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


def story(words: str = "words", **more: Any) -> Story:
    failures = [
        Failed(n, n, at(20 * n), words, f"replica 1 on node{n} {words}", kind, [("How", words)],
               [words], words)
        for n, kind in enumerate(("restart", "disruption", "nothing"), 1)
    ]  # fmt: skip
    lines = [
        Line(
            f"attempt {n} {words}", {"loss": [[10 * n + i, 5 / (10 * n + i)] for i in range(1, 12)]}
        )
        for n in range(4)
    ]
    rounds = [Round(n, 0, at(20 * n), at(20 * n + 19), 9, words, n == 4) for n in range(1, 5)]
    found = Story(
        f"n/j {words}", [("Phase", words)], [("Stalled", words)], rounds, failures, lines, words,
        [("productive", 0.9, "9 h", words), ("recovering", 0.1, "1 h", words)],
        [(words, words, words)], NOW, {"Timeline": words, "Curves": words},
    )  # fmt: skip
    return replace(found, **more)


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def those(root: ElementTree.Element, name: str, kind: str = "") -> list[ElementTree.Element]:
    return [
        one for one in root.iter(SVG + name) if kind in one.get("class", "").split() or not kind
    ]


def test_each_failure_round_and_restart_is_drawn():
    root = parsed(page.write(story()))
    links = [one.get("href") for one in those(root, "a")]
    assert links == ["#failure-1", "#failure-2", "#failure-3"]
    assert {one.get("id") for one in those(root, "article")} == {link[1:] for link in links if link}
    for kind in ("restart", "disruption", "nothing"):
        assert len(those(root, "path", kind)) == 3, "in the timeline, its legend and the failure"
    assert len(those(root, "polyline", "line")) == 4
    assert len(those(root, "line", "begins")) == 3, "each start but the first"
    assert len(those(root, "rect", "now")) == 1
    text = " ".join("".join(root.itertext()).split())
    assert "attempt 2; lost: (2) replica 1 on node2" in text
    for drawing in those(root, "svg"):
        if drawing.get("role"):
            assert drawing.get("aria-label")
            assert drawing.find(f"{SVG}title") is not None


def test_what_strangers_say_stays_text():
    root = parsed(page.write(story(HOSTILE)))
    assert "<script>alert(1)</script>" in "".join(root.itertext())
    names = {one.tag.removeprefix(SVG) for one in root.iter()}
    assert not names & {"script", "iframe", "img", "link", "object", "image", "use"}
    for one in root.iter():
        for name, value in one.attrib.items():
            assert not name.startswith("on")
            assert name not in ("href", "src") or value.startswith("#")


def test_odd_numbers_are_drawn_too():
    for points in (
        [[1, 0.0]],
        [[5, -1e300], [6, 1e300]],
        [[1, 2.0], [9, 2.0]],
        [[3, 1e-300]],
        [[1, 1e-322]],
    ):
        root = parsed(page.write(story(lines=[Line("a", {"loss": points})])))
        assert those(root, "polyline" if len(points) > 1 else "circle")


# --- Through kubectl ----------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = plugin.answers(monkeypatch)
    job = plugin.job()
    job["spec"] |= {"snapshot": {"path": "/s", "volume": {}}}
    lost = {"attempt": 1, "round": 0, "replica": 1, "node": "n1", "class": "User",
            "chargedTo": "maxRestarts", "charge": 1, "detectedAt": f"{at(0):%Y-%m-%dT%H:%M:%SZ}",
            "message": "<b>last</b>"}  # fmt: skip
    job["status"] |= {"attempt": 2, "restarts": {}, "failures": [lost]}
    found["get ddpjobs.ddpjob.dev"] = job
    return found


def incident(attempt: int, **more: Any) -> dict[str, Any]:
    began, end = (f"{at(minutes):%Y-%m-%dT%H:%M:%SZ}" for minutes in (attempt * 9 - 9, attempt * 9))
    return {"uid": "u", "attempt": attempt, "round": 0, "began": began, "at": end, **more}


def test_a_job_that_runs_has_its_rounds_and_curves(answers, capsys):
    curves = {"loss": [[1, 2.0], [2, "x"], [3, 1.5], [4, float("nan")], [5, 10**400]], "none": []}
    found = [incident(2, running=[0], curves=curves), incident(1, failed=[1], curves=curves)]
    found.append(incident(3) | {"began": "2024-13-45T99:00:00Z"})
    answers |= {"get pods": {"items": [plugin.pod(0, 2)]}, "get events": {"items": []}}
    answers["exec"] = {"incidents": found}
    assert cli.run(["why", "j", "--html", "-"]) == 0
    root = parsed(capsys.readouterr().out)
    assert len(those(root, "rect", "round")) == 3, "two, and the legend's"
    assert len(those(root, "line", "begins")) == 1
    assert len(those(root, "polyline")) == 2
    assert "no ledger yet" in "".join(root.itertext())


def test_a_job_that_nobody_can_read_more_of_says_what_is_missing(answers, capsys):
    assert cli.run(["why", "j", "--html", "-"]) == 0
    root = parsed(capsys.readouterr().out)
    missing = ["".join(one.itertext()) for one in those(root, "p", "missing")]
    assert [re.sub(r" .*(you may not|no ledger).*", r" .. \1", one) for one in missing] == [
        "The .. you may not", "Nothing .. you may not", "j .. no ledger", "without .. you may not",
    ]  # fmt: skip
    assert len(those(root, "a")) == 1, "the failure that the status knows"


def test_the_event_log_is_drawn_instead(answers, tmp_path, capsys):
    log = tmp_path / "events.jsonl"
    said = [
        {"event": "resume", "step": 0},
        *({"event": "step", "step": n, "loss": 1 / n} for n in (1, 2)),
    ]
    said += [{"event": "log", "step": 2, "values": {"acc": 0.5, "odd": "nan"}}]
    said += [
        {"event": "resume", "step": 1},
        {"event": "step", "step": 2, "loss": 0.5},
        {"event": "step", "step": 10**400, "loss": 0.5},
        {"event": "end"},
    ]
    log.write_text("".join(json.dumps(one) + "\n" for one in said) + '{"event": "st')
    first, second = life.logged(str(log))
    assert first.curves == {"loss": [[1, 1.0], [2, 0.5]], "acc": [[2, 0.5]]}
    assert (second.label, second.curves) == ("after step 1", {"loss": [[2, 0.5]]})
    where = tmp_path / "page.html"
    where.write_text("of before")
    assert cli.run(["why", "j", "--html", str(where), "--events", str(log)]) == 0
    root = parsed(where.read_text())
    assert "Nothing can be drawn" not in "".join(root.itertext())
    assert len(those(root, "line", "begins")) == 1
    assert capsys.readouterr().out == f"{where}: 0 rounds, 1 failures\n"
    assert cli.run(["why", "j", "--events", str(log)]) == 1
    assert "give --html FILE, too" in capsys.readouterr().err
    for wrong, words in (("--html", "cannot be written: No such"), ("--events", "cannot be read")):
        given = {"--html": str(where), "--events": str(log), wrong: str(tmp_path / "none/x")}
        assert cli.run(["why", "j", *(word for pair in given.items() for word in pair)]) == 1
        assert words in capsys.readouterr().err


def test_what_is_no_file_is_written_in_place(answers, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert cli.run(["why", "j", "--html", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert parsed((tmp_path / "page.html").read_text())
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)  # as /dev/null: not replaced
    assert cli.run(["why", "j", "--html", str(tmp_path / "pipe")]) == 0
    assert parsed(os.read(pipe, 10**6).decode())
    os.close(pipe)


def test_the_page_is_utf_8_in_any_locale(answers, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    answers["get ddpjobs.ddpjob.dev"]["status"]["failures"][0]["message"] = "größer"
    assert cli.run(["why", "j", "--html", "-"]) == 0
    assert "größer".encode() in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_long_event_log_is_thinned(tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text("".join(f'{{"event":"step","step":{n},"loss":{n}}}\n' for n in range(5000)))
    (line,) = life.logged(str(log))
    assert len(line.curves["loss"]) < 1100
    assert line.curves["loss"][-1] == [4999, 4999]
