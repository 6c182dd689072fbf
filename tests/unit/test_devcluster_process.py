"""The devcluster's processes: a pid that was given away is not ours, and is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devcluster import process
from devcluster.process import Register
from support.patience import PATIENCE


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "infinity"]) as started:
        yield started
        started.kill()


def identity_of(child: subprocess.Popen[bytes]) -> process.Identity:
    found = process.identify(child.pid)
    assert found is not None
    return found


def test_stat_is_read_past_a_name_with_brackets_and_spaces() -> None:
    rest = " ".join(str(number) for number in range(1, 50))
    assert process.parse_stat(f"77 (a) R (b c) S {rest}") == ("S", 19)


def test_a_running_process_is_alive_and_an_ended_one_is_not(
    child: subprocess.Popen[bytes],
) -> None:
    identity = identity_of(child)
    assert process.is_alive(identity)
    child.kill()
    child.wait()
    assert not process.is_alive(identity)


def test_a_zombie_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child)
    child.kill()
    deadline = time.monotonic() + PATIENCE
    while process.is_alive(identity):  # not waited for: it stays a zombie
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists()


def test_a_process_of_which_a_thread_is_left_is_alive() -> None:
    script = (
        "import ctypes, platform, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "number = {'x86_64': 60, 'aarch64': 93}[platform.machine()]  # exit, of this thread only\n"
        "ctypes.CDLL(None).syscall(number, 0)\n"
    )
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + PATIENCE
        while process.parse_stat(Path(f"/proc/{child.pid}/stat").read_text())[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        alive = process.identify(child.pid)
        child.kill()
        assert alive is not None
        while process.identify(child.pid) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("other", [{"started": 1}, {"boot": "another"}])
def test_the_same_pid_of_another_process_is_neither_alive_nor_ended(
    child: subprocess.Popen[bytes], other: dict[str, int | str]
) -> None:
    foreign = replace(identity_of(child), **other)  # type: ignore[arg-type]
    assert not process.is_alive(foreign)
    assert process.end([foreign], polite=False) == []
    assert child.poll() is None


def test_a_polite_end_lets_a_process_clean_up(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    script = (
        f"trap 'touch {mark}; exit 0' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    )
    with subprocess.Popen(["sh", "-c", script]) as child:
        while not (tmp_path / "ready").exists():
            assert child.poll() is None
            time.sleep(0.01)
        assert process.end([identity_of(child)], seconds=PATIENCE) == []
    assert mark.exists()


def test_a_deaf_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", script]) as child:
        while not (tmp_path / "ready").exists():
            assert child.poll() is None
            time.sleep(0.01)
        signal_it, sent = process._signal, []

        def and_see_it_die(one: process.Identity, number: signal.Signals) -> None:
            sent.append(number)
            signal_it(one, number)
            if number == signal.SIGKILL:  # which may take longer than SIGTERM is given here
                child.wait(PATIENCE)

        monkeypatch.setattr(process, "_signal", and_see_it_die)
        left = process.end([identity_of(child)], seconds=0.3)
        child.kill()  # where it was not: else this waits for ever
        assert left == []
        assert sent == [signal.SIGTERM, signal.SIGKILL]
        assert child.wait(PATIENCE) == -9


def test_who_ends_in_time_is_gone_however_long_we_stood_still_ourselves(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_still(one: process.Identity, number: signal.Signals) -> None:
        child.kill()
        child.wait()

    monkeypatch.setattr(process, "_signal", stand_still)
    assert process.end([identity_of(child)], seconds=0, polite=False) == []


def test_a_proxy_of_the_caller_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    pid = process.start(["env"], tmp_path / "log", {"MARK": "1"})
    deadline = time.monotonic() + PATIENCE
    while process.identify(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    seen = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines())
    assert seen["MARK"] == "1"
    assert seen["PATH"] == os.environ["PATH"]
    assert "HTTPS_PROXY" not in seen


def test_records_are_read_back(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    register = Register(tmp_path / "process")
    identity = replace(identity_of(child), spec="abc")
    register.write("etcd", identity)
    assert register.read("etcd") == identity
    assert register.running("etcd") == identity
    assert register.names() == ["etcd"]
    register.forget("etcd")
    assert register.read("etcd") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "null"])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "etcd.json").write_text(text)
    assert Register(tmp_path).read("etcd") is None


def test_the_log_of_a_dead_process_is_quoted_on_one_line(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert process.last_lines(log) == "(no log)"
    log.write_text("one\ntwo\n\nthree\nfour\n")
    assert process.last_lines(log, 2) == "three | four"
