"""`kubectl ddp status -w` and `logs -f`: a job that is looked at until it ends."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kubectl_ddp import cli, gang, podproxy
from kubectl_ddp.commands import logs
from kubectl_ddp.kubectl import Failure, Kubectl, Missing
from support.plugin import fake_kubectl, job, pod

Look = tuple[Any, Any]
Play = Callable[[str, list[Look]], int]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function: a command and what the API server has at each look -> exit code."""
    monkeypatch.setattr(gang, "_PAUSE", 0.0)
    monkeypatch.setattr(podproxy, "read", lambda *_: ({}, ""))

    def run(command: str, looks: list[Look]) -> int:
        left = list(looks)
        pods: list[Any] = [looks[0][1]]

        def read(_: Kubectl, *words: str) -> str:
            if words[1] == "pods" and isinstance(pods[0], Failure):
                failure, pods[0] = pods[0], []
                raise failure
            if words[1] == "pods":
                return json.dumps({"items": pods[0]})
            assert left, "it goes on after the end"
            found, pods[0] = left.pop(0)
            if isinstance(found, Failure):
                raise found
            return json.dumps(found)

        monkeypatch.setattr(Kubectl, "read", read)
        code = cli.run(command.split())
        assert not left, "it ended early"
        return code

    return run


@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 3)])
def test_status_is_printed_again_on_change_and_tells_how_the_job_ended(play, capsys, phase, code):
    looks = [("Starting", 1), ("Starting", 1), ("Running", 2), (phase, 3)]
    assert play("status -w j", [(job(*look), []) for look in looks]) == code
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "Phase:" in line]
    assert shown == ["Starting", "Running", phase]


def test_each_look_is_one_line_of_json(play, capsys):
    looks: list[Look] = [(job("Running", 1), [pod(1, 1)]), (job("Succeeded", 2), [])]
    assert play("status j -w -o json", looks) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one.get("pod") for one in first["replicas"]] == [None, "j-1"]
    assert last["job"]["status"]["phase"] == "Succeeded"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("status -w", "are about one job: name it"),
        ("status -o json", "are about one job: name it"),
        ("status -A d", "-A lists all jobs: leave it out"),
    ],
)
def test_all_jobs_or_one(command, says, capsys):
    assert cli.run(command.split()) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status -w j", "logs -f j"])
@pytest.mark.parametrize(
    "away",
    [(Failure("refused"), []), (job("Running", 2), Failure("refused"))],
    ids=["before the job is read", "between job and pods"],
)
def test_an_api_server_that_is_away_ends_no_watch(play, capsys, command, away):
    assert play(command, [(job("Running"), []), away, (job("Succeeded", 3), [])]) == 0
    assert "kubectl-ddp: refused: trying on\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status -w j", "logs -f j"])
def test_what_fails_from_the_start_is_told_at_once(play, capsys, command):
    assert play(command, [(job("Running"), Failure("you may not list pods"))]) == 1
    assert capsys.readouterr().err == "kubectl-ddp: you may not list pods\n"


@pytest.mark.parametrize(
    ("now", "says"),
    [(Missing('no DDPJob "j" here'), 'no DDPJob "j"'), (job("Running", 2, "v"), "is another one")],
)
def test_a_job_that_is_gone_ends_it(play, capsys, now, says):
    assert play("status -w j", [(job("Running"), []), (now, [])]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["logs j", "logs j --failed"])
def test_the_log_of_a_failed_init_container_is_the_log(command, play, monkeypatch, capsys):
    shown: list[tuple[str, ...]] = []
    monkeypatch.setattr(Kubectl, "show", lambda _, *words: shown.append(words))
    broken, found = pod(0, 1, "waiting"), job("Restarting")
    ended = {"exitCode": 6}
    broken["status"]["initContainerStatuses"] = [{"name": "fetch", "state": {"terminated": ended}}]
    loss = {"replica": 0, "attempt": 1, "class": "User", "reason": "InitContainerFailed"}
    found["status"] |= {"lastFailure": loss, "failures": [loss]}
    assert play(command, [(found, [broken])]) == 0
    assert [words[:5] for words in shown] == [("logs", "-n", "n", "j-0", "-c")]
    assert shown[0][5] == "fetch"
    assert "--- j-0, init container fetch" in capsys.readouterr().out


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """Replicas, attempt and whether all of the log is wanted, of each stream that began."""
    begun: list[tuple[str, str, bool]] = []

    def begin(self: logs._Streams, _: Any, fresh: Any, how_much: list[str]) -> None:
        attempts = {str(one.attempt) for one in fresh.values()}
        begun.append((",".join(map(str, fresh)), ",".join(attempts), how_much == ["--tail=-1"]))
        self.followed |= {n: one.uid for n, one in fresh.items()}

    monkeypatch.setattr(logs._Streams, "begin", begin)
    return begun


def test_logs_are_followed_from_one_attempt_to_the_next_until_the_job_ends(play, followed, capsys):
    looks: list[Look] = [
        (job("Starting", 1), [pod(0, 1), pod(1, 1, "waiting")]),
        (job("Running", 2), [pod(0, 1), pod(1, 1)]),
        (job("Restarting", 3), []),
        (job("Running", 4), [pod(0, 2), pod(1, 2)]),
        (job("Succeeded", 5), [pod(0, 2, "terminated")]),
    ]
    assert play("logs -f j --tail 5", looks) == 0
    assert followed == [("0", "1", False), ("1", "1", False), ("0,1", "2", True)]
    told = "attempt 2: new pods, whose logs follow: replicas 0-1\n"
    assert capsys.readouterr().err == told


def test_before_any_pod_starts_it_waits_and_says_so_once(play, followed, capsys):
    looks: list[Look] = [
        (job("Starting", 1), []),
        (job("Starting", 2), [pod(0, 1, "waiting")]),
        (job("Running", 3), [pod(0, 1), pod(1, 1)]),
        (job("Failed", 4), []),
    ]
    assert play("logs -f j --replica 1", looks) == 0
    assert followed == [("1", "1", True)]
    assert capsys.readouterr().err == "j is Starting: logs follow when pods start\n"


def test_a_stream_that_breaks_off_is_no_end(play, followed, capsys):
    runs = (job("Running"), [pod(0, 1), pod(1, 1)])
    assert play("logs -f j", [runs] * (logs.BROKEN + 1)) == 1
    assert "has broken off: `kubectl ddp logs -f j --since 1m`" in capsys.readouterr().err


def test_a_pod_of_a_lost_node_that_is_to_go_ends_nothing(play, followed):
    lost = pod(1, 1)
    lost["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    waits = (job("Restarting", 2), [lost])
    looks = [(job("Running"), [pod(0, 1), pod(1, 1)]), *[waits] * (logs.BROKEN + 1)]
    new = (job("Running", 3), [pod(0, 2), pod(1, 2)])
    assert play("logs -f j", [*looks, new, (job("Succeeded", 4), [])]) == 0
    assert [attempt for _, attempt, _ in followed] == ["1", "2"]


def test_kubectl_is_asked_for_pods_of_one_attempt_and_its_failure_is_told(
    play, monkeypatch, tmp_path, capsys
):
    script = 'echo "$@" > "$HERE/said"; echo "bad --since" >&2; exit 1'
    for name, value in fake_kubectl(tmp_path, script).items():
        monkeypatch.setenv(name, value)

    def until_it_ends(self: logs._Streams) -> bool:
        for process, _ in self._open:
            process.wait()
        return alive(self)

    alive = logs._Streams.alive
    monkeypatch.setattr(logs._Streams, "alive", until_it_ends)
    runs = (job("Running"), [pod(0, 3), pod(1, 3)])
    assert play("logs -f j --since abc", [runs, runs]) == 1
    assert "bad --since" in capsys.readouterr().err
    said = (tmp_path / "said").read_text()
    assert "ddpjob.dev/attempt=3,ddpjob.dev/replica in (0,1)" in said
    assert said.split()[-3:] == ["--tail=-1", "--since=abc", "-f"]
