"""The command itself: how it ends before it has begun or while a thread waits, and how it logs."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kopf._cogs.clients.errors import APIError
from kopf._cogs.clients.watching import WatchingError

from ddpjob_operator.__main__ import configure_logs
from support.operator import PATHS, write_kubeconfig
from support.patience import PATIENCE

ENV = {"PATH": "/usr/bin:/bin", "PYTHONPATH": PATHS, "POD_NAME": "a"}

SIGNALLED = """
import os, signal, sys
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "ddpjob_operator.shell":
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Importing())
from ddpjob_operator.__main__ import main
main()
"""

SILENT_RESOLVER = """
import os, signal, socket, threading
usual = socket.getaddrinfo
def getaddrinfo(host, *args, **kwargs):
    if host == "api.example":
        print("looked up", flush=True)
        threading.Event().wait()
    return usual(host, *args, **kwargs)
socket.getaddrinfo = getaddrinfo
from ddpjob_operator.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_it_imports_ends_it(name):
    """To PID 1, which it is in a pod, the kernel delivers no signal that has no handler."""
    command = [sys.executable, "-c", SIGNALLED.format(name=name)]
    done = subprocess.run(
        command, env=ENV, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_resolver_that_never_answers_does_not_keep_it(tmp_path):
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", "http://api.example:1", "default")
    command = [
        *(sys.executable, "-c", SILENT_RESOLVER, "--kubeconfig", str(kubeconfig)),
        *("--probe-host", "127.0.0.1", "--probe-port", "0"),
    ]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "looked up\n"
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


@pytest.fixture
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("error", [WatchingError("429"), APIError({}, status=500, headers={})])
def test_a_watch_that_the_api_server_ended_is_no_traceback(error, capsys):
    configure_logs("info", "text")
    log = logging.getLogger("kopf._core.reactor.orchestration")
    log.error("Watcher has failed", exc_info=error)
    assert capsys.readouterr().err == ""
    log.error("Watcher has failed", exc_info=KeyError("a bug"))
    assert "KeyError: 'a bug'" in capsys.readouterr().err
    configure_logs("debug", "text")
    log.error("Watcher has failed", exc_info=error)
    assert type(error).__name__ in capsys.readouterr().err


@pytest.mark.usefixtures("as_before")
def test_a_quoted_line_end_makes_no_line_of_its_own(capsys):
    configure_logs("info", "text")
    logging.getLogger("ddpjob_operator").warning("refused: %s", "a\n2026 ERROR b\x1b[31m")
    assert capsys.readouterr().err.count("\n") == 1
