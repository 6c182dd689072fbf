"""Tables, ages and kubectl's refusals, as the plugin shows them; and what it is made of."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kubectl_ddp import __main__, cli, podproxy, text
from kubectl_ddp.kubectl import Failure, Kubectl, Missing, explained
from support.cluster import wait_for
from support.patience import PATIENCE
from support.plugin import fake_kubectl, job, pod

SOURCE = Path(cli.__file__).parent


def test_it_imports_the_standard_library_only():
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                found.add(str(node.module))
    tops = {name.partition(".")[0] for name in found}
    assert {"argparse", "subprocess", "kubectl_ddp"} <= tops
    assert tops - {"kubectl_ddp", "ddpjob_contract"} <= sys.stdlib_module_names


AGES = {
    -3: "0s", 0: "0s", 119: "119s", 120: "2m", 200: "3m20s", 600: "10m", 10799: "179m",
    10800: "3h", 18600: "5h10m", 28800: "8h", 172799: "47h", 172800: "2d",
}  # fmt: skip


def test_ages():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for seconds, shown in AGES.items():
        assert text.duration(seconds) == shown
        assert text.since(now - timedelta(seconds=seconds), now) == shown
    assert text.since(None, now) == "-"


def test_tables_are_aligned_wrapped_and_move_no_cursor():
    shown = text.table(("A", "BB", "C"), [["1", "2", ""], ["long", "2", "x"]])
    assert shown == ["A      BB   C", "1      2", "long   2    x"]
    lines = text.wrapped_table(("A", "MESSAGE"), [["1", "word " * 60], ["2", "short"]], 80, 3)
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("1   word word")
    assert [line.strip() for line in lines[4:]] == ["...", "2   short"]
    assert all(line.startswith("    word") for line in lines[2:4])
    assert text.wrapped_table(("A", "MESSAGE"), [["1", ""]], 80) == ["A   MESSAGE", "1"]
    assert text.clean("a\x1b[2J\tb\r\nc\x07") == "a?[2J   b?\nc?"
    assert "\x1b" not in "".join(text.table(("A",), [["\x1b[31m"]]))
    shown = [text.ranges(one) for one in ([], [3], [0, 1, 2, 5], [2, 0, 2])]
    assert shown == ["", "3", "0-2,5", "0,2"]


#: What kubectl 1.36 wrote to stderr.
WORDS = {
    'error: the server doesn\'t have a resource type "ddpjobs"': "install the operator's chart",
    'Error from server (NotFound): ddpjobs.ddpjob.dev "nope" not found': (
        'no DDPJob "nope" here: `kubectl ddp status -A`'
    ),
    (
        'Error from server (Forbidden): pods "x" is forbidden: User "bob" cannot get resource'
        ' "pods/log" in API group "" in the namespace "default"'
    ): (
        "you may not get pods/log in namespace default: ask for a role with verb get on resource"
        " pods/log"
    ),
    (
        'Error from server (Forbidden): ddpjobs.ddpjob.dev is forbidden: User "bob" cannot list'
        ' resource "ddpjobs" in API group "ddpjob.dev" at the cluster scope'
    ): "you may not list ddpjobs of ddpjob.dev in all namespaces",
    (
        'E1123 18:59:33.625    1184 memcache.go:265] "Unhandled Error" err="refused"\n'
        "The connection to the server 127.0.0.1:1 was refused - did you specify the right host?\n"
    ): "kubectl: The connection to the server 127.0.0.1:1 was refused",
    (
        'Error: invalid argument "abc" for "--since" flag: time: invalid duration "abc"\n'
        "See 'kubectl logs --help' for usage.\n"
    ): 'kubectl: Error: invalid argument "abc"',
    (
        "ddpjob-trainer: /snapshots/a is no directory; give another\n"
        "command terminated with exit code 1\n"
    ): "kubectl: ddpjob-trainer: /snapshots/a is no directory",
    "command terminated with exit code 1\n": "kubectl: command terminated with exit code 1",
    "": "kubectl failed without a word",
}


def test_kubectls_refusals_become_one_line():
    for said, line in WORDS.items():
        assert line in explained(said)
        assert "\n" not in explained(said)


def test_a_job_that_is_missing_is_told_from_an_api_server_that_is_away(monkeypatch, tmp_path):
    says = next(said for said in WORDS if "NotFound" in said)
    monkeypatch.setenv("PATH", fake_kubectl(tmp_path, f"echo '{says}' >&2; exit 1")["PATH"])
    with pytest.raises(Missing):
        Kubectl().read("get")


def test_without_kubectl_the_cure_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure, match="no kubectl on PATH: install it"):
        Kubectl().read("version")
    assert cli.run(["status"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_what_is_nested_too_deep_is_told_with_the_cure(monkeypatch):
    monkeypatch.setattr(Kubectl, "read", lambda *_: "[" * 100_000)
    with pytest.raises(Failure, match="name a job, or a --namespace without it"):
        Kubectl().items("ddpjobs")
    deep = '{"a":' * 9_900 + "1" + "}" * 9_900
    monkeypatch.setattr(Kubectl, "read", lambda *_: f'{{"items": [{deep}, {{}}]}}')
    assert Kubectl().items("ddpjobs")[1] == {}, "the API server takes what is so deep"


@pytest.mark.parametrize("deaf", ["", "trap '' TERM; "])
@pytest.mark.tier("gate")
def test_no_kubectl_is_left_behind(tmp_path, deaf):
    (tmp_path / "ddpjobs.ddpjob.dev").write_text(json.dumps(job()))
    (tmp_path / "pods").write_text(json.dumps({"items": [pod(0, 1)]}))
    follows = (
        f'{deaf}[ $1 = get ] && exec cat "$HERE/$2"; '
        'echo $$ > "$HERE/new"; mv "$HERE/new" "$HERE/pid"'
    )
    env = fake_kubectl(tmp_path, f"{follows}; exec sleep 300")
    command = [sys.executable, "-m", "kubectl_ddp", "logs", "-f", "j"]
    plugin = subprocess.Popen(command, env=env)
    wait_for(lambda: (tmp_path / "pid").exists() or None, "kubectl to follow")
    followed = int((tmp_path / "pid").read_text())
    plugin.terminate()
    assert plugin.wait(PATIENCE) == 143
    gone = Path(f"/proc/{followed}")
    try:
        wait_for(lambda: not gone.exists() or None, "kubectl to end")
    finally:
        if gone.exists():
            os.kill(followed, signal.SIGKILL)


def test_no_kubectl_is_left_behind_by_who_is_told_to_end_as_it_starts(monkeypatch, tmp_path):
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("PATH", fake_kubectl(tmp_path, "exec sleep 300")["PATH"])
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, __main__._end)
    try:
        with pytest.raises(SystemExit):
            Kubectl().show("logs")
        assert started[0].poll() == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
        with started[0]:
            started[0].kill()


def test_flags_are_passed_on_from_before_and_behind_the_command(monkeypatch, tmp_path):
    for name, value in fake_kubectl(tmp_path, 'echo "$@" > "$HERE/said"; exit 1').items():
        monkeypatch.setenv(name, value)
    cli.run(["-n", "team", "--context=c", "status", "--kubeconfig", "f", "job"])
    assert (tmp_path / "said").read_text().split() == [
        "--namespace=team", "--context=c", "--kubeconfig=f",
        "get", "ddpjobs.ddpjob.dev", "job", "-o", "json",
    ]  # fmt: skip


def test_a_locale_that_lacks_a_letter_shows_the_rest(tmp_path):
    failed = {"status": {"phase": "Failed", "reason": "é模"}}
    (tmp_path / "jobs").write_text(json.dumps({"items": [job() | failed]}, ensure_ascii=False))
    env = fake_kubectl(tmp_path, 'exec cat "$HERE/jobs"') | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "kubectl_ddp", "status"]
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert b"\xe9?" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "answer", ["", "<html>log in</html>", "\\377", "null", "[]", "{}", '{"items": [3]}']
)
@pytest.mark.parametrize("command", ["status", "suspend j"])
def test_an_answer_that_is_no_job_is_told_in_a_line(command, answer, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", fake_kubectl(tmp_path, f"printf '{answer}'")["PATH"])
    assert cli.run(command.split()) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    told = "" if answer == "\\377" else f"but {answer or 'nothing'!r}"  # no byte of a text
    assert f"{told}: is the kubectl on PATH the real one?" in err


def test_the_socket_of_the_proxy_has_a_short_path_wherever_tmpdir_is(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("d" * 100)))
    monkeypatch.setenv("PATH", fake_kubectl(tmp_path, "echo serves; exec sleep 300")["PATH"])
    with podproxy._serving(Kubectl()) as path, socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)


def test_without_a_proxy_the_table_has_no_steps(tmp_path):
    (tmp_path / "jobs").write_text(json.dumps({"items": [job()]}))
    env = fake_kubectl(
        tmp_path, '[ $1 = get ] && exec cat "$HERE/jobs"; echo no socket >&2; exit 1'
    )
    command = [sys.executable, "-m", "kubectl_ddp", "status"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == "no steps and no snapshots of pods: kubectl: no socket\n"
    assert done.stdout.splitlines()[1].split() == ["j", "Running", "-", "-", "0", "-", "-", "-"]
    assert done.returncode == 0


def test_every_command_explains_itself(capsys):
    for command in ("status", "logs", "events", "stacks", "suspend", "resume", "snapshots"):
        with pytest.raises(SystemExit) as ended:
            cli.run([command, "--help"])
        assert ended.value.code == 0
        assert f"usage: kubectl ddp {command}" in capsys.readouterr().out
