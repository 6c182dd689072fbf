"""The launcher's log and its workers' output, when nobody reads and when strays hold a pipe."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ddpjob_trainer.launcher import output as log_module
from ddpjob_trainer.launcher.output import Log, OutputPump
from support.patience import PATIENCE

NEVER = 1e6  # seconds


@contextmanager
def unread(*targets: int) -> Iterator[int]:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    kept = {target: os.dup(target) for target in targets}
    for target in targets:
        os.dup2(write, target)
    os.close(write)
    try:
        yield read
    finally:
        for target, old in kept.items():
            os.dup2(old, target)
            os.close(old)


def ends(flush: Callable[[], object]) -> bool:
    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


class Reader:
    def __init__(self, fd: int) -> None:
        self.found = b""
        self._fd = fd
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while data := os.read(self._fd, 65536):
            self.found += data

    def until(self, words: bytes) -> bytes:
        deadline = time.monotonic() + PATIENCE
        while words not in self.found:
            assert time.monotonic() < deadline, self.found[-500:]
            time.sleep(0.002)
        return self.found


def test_what_nobody_reads_is_kept_up_to_a_bound_then_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(log_module, "_MAX_BYTES", 200_000)
    monkeypatch.setattr(log_module, "_PATIENCE_SECONDS", NEVER)
    monkeypatch.setattr(log_module, "_FLUSH_SECONDS", NEVER)
    with unread(1, 2) as pipe:
        log = Log()
        log.put(2, b"x" * 99_999 + b"\n")
        log.wait_for_room(2)  # the pipe is full
        for number in range(10_000):
            log.say(f"{number:080}")
        reader = Reader(pipe)
        log.flush()
        log.say("after")
        lines = reader.until(b"launcher: after\n").decode().splitlines()
    said = [line for line in lines if line.startswith("launcher: 0")]
    assert 1000 < len(said) < 3000
    assert said == [f"launcher: {number:080}" for number in range(len(said))]
    words = f"launcher: {10_000 - len(said)} lines were dropped: nobody read the log"
    assert lines[-2:] == [words, "launcher: after"]


@pytest.mark.parametrize(
    ("hurry", "short"), [(False, "_PATIENCE_SECONDS"), (False, "_FLUSH_SECONDS"), (True, "")]
)
def test_a_reader_that_stands_still_is_not_waited_for_at_the_end(monkeypatch, hurry, short):
    for name in ("_PATIENCE_SECONDS", "_FLUSH_SECONDS"):
        monkeypatch.setattr(log_module, name, 0.05 if name == short else NEVER)
    with unread(1, 2):
        log = Log()
        log.put(1, b"x" * 1_000_000)
        ended = ends(lambda: log.flush(hurry=hurry))
    assert ended


def test_stderr_is_written_while_nobody_reads_stdout():
    with unread(1), unread(2) as errors:
        log = Log()
        log.put(1, b"x" * 1_000_000)
        log.say("heard")
        assert os.read(errors, 100) == b"launcher: heard\n"


def test_reports_and_evidence_show_no_password_of_the_uploads_url():
    url = "s3://key:pa55word@store/bucket"
    pump = OutputPump(Log(), prefixed=True, secret_url=url)
    out, err = pump.pipes(0)
    os.write(out, f"using {url} as pa55word\n".encode())
    os.write(err, b'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n')
    os.write(err, f"OSError: cannot open {url}/vocab.txt\n".encode())
    pump.collect(0)
    assert "pa55word" not in str([*pump.tail(0), pump.exception(0)])
    assert pump.exception(0) == "OSError: cannot open s3://***@store/bucket/vocab.txt"
    os.close(out)
    os.close(err)


def test_a_workers_last_words_are_known_though_a_stray_holds_its_pipe():
    with unread(1, 2) as pipe:
        log = Log()
        log.put(1, b"x" * 1_000_000)  # no room: the thread that reads pipes waits
        pump = OutputPump(log, prefixed=True)
        out, err = pump.pipes(0)
        os.write(out, b"one\ntwo\n")
        os.write(err, b"ValueError: three")
        pump.collect(0)  # both writing ends are open
        assert pump.tail(0) == ["one", "two", "ValueError: three"]
        os.write(out, b"of the stray\n")
        os.close(out)
        os.close(err)
        found = Reader(pipe).until(b"[rank 0] of the stray\n")
    expected = b"[rank 0] one\n[rank 0] two\n[rank 0] ValueError: three\n[rank 0] of the stray\n"
    assert found.endswith(expected)
