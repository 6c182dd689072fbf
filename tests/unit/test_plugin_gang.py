"""What the plugin makes of jobs, pods, trainers' pages and Events."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_contract import crd
from ddpjob_trainer.telemetry import metrics
from kubectl_ddp import cli, gang, text
from kubectl_ddp.commands import events, pods, status
from kubectl_ddp.gang import Job, Member, Report
from kubectl_ddp.kubectl import Failure, Kubectl
from support import plugin
from support.cluster import ROOT

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def at(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(**found: Any) -> Job:
    made = plugin.job()
    made["metadata"] |= {"name": "d", "namespace": "t", "creationTimestamp": at(900)}
    return Job({**made, "status": found})


def pod(replica: int = 0, *, state: Any = None, **meta: Any) -> dict[str, Any]:
    labels = {crd.LABEL_REPLICA: str(replica), crd.LABEL_ATTEMPT: "2"}
    containers = [{"name": "sidecar", "ready": True, "state": {"running": {}}}]
    if state:
        containers.append({"name": "trainer", "ready": "running" in state, "state": state})
    return {
        "metadata": {
            "name": f"d-{replica}",
            "labels": labels,
            "annotations": {crd.ANNOTATION_TRAINER: "trainer"},
            **meta,
        },
        "spec": {
            "nodeName": "n1",
            "containers": [
                {"name": "sidecar", "env": [{"name": "DIR", "value": "no"}]},
                {"name": "trainer", "env": [{"name": "DIR", "value": "/s/d"}]},
            ],
        },
        "status": {"phase": "Running", "containerStatuses": containers},
    }


def head(found: Job, told: Any = None, **more: Any) -> list[str]:
    return status.head_lines(found, told or {}, NOW, **more)


def row(found: Job, told: Any) -> list[str]:
    members = {0: Member(pod(state={"running": {}}))}
    return status.gang_table(found, members, told, NOW)[1].split()


FAILURE = {
    "attempt": 1, "round": 2, "replica": 1, "rank": 3, "node": "n2", "class": "User",
    "reason": "ExitCode1", "exitCode": 1, "message": "ValueError: boom\nline",
    "detectedAt": at(199.5).replace("Z", ".5Z"),
}  # fmt: skip


def test_on_the_hosts_network_each_pod_is_asked_at_its_own_port():
    found = pod(1, state={"running": {}})
    found["spec"]["containers"][1]["env"].append({"name": contract.METRICS_PORT, "value": "25007"})
    assert job().page("state", 1, Member(found)).endswith("/d-1:25007/proxy/state?uid=u")
    assert job().page("state", 1, Member(pod(1))).endswith("/d-1:9400/proxy/state?uid=u")
    assert job().page("state", 1, None).endswith("/d-1:9400/proxy/state?uid=u")


def test_the_list_looks_up_first_pods_on_the_hosts_network_together():
    host = job()
    host.obj["spec"]["template"] = {"spec": {"hostNetwork": True}}
    owner = {"controller": True, "uid": host.uid}
    ours = pod(0, ownerReferences=[owner])
    ours["metadata"]["labels"][crd.LABEL_JOB_UID] = host.uid
    stranger = pod(0)
    stranger["metadata"]["labels"][crd.LABEL_JOB_UID] = host.uid
    calls = []

    class Recorded(Kubectl):
        def items(self, *args: str) -> list[dict[str, Any]]:
            calls.append(args)
            return [ours, stranger]

    assert gang.find_first(Recorded(), [host], "-A") == {host.uid: Member(ours)}
    plain = job()
    plain.obj["spec"]["template"] = {"spec": {}}
    assert gang.find_first(Recorded(), [plain]) == {}
    assert calls == [("pods", "-A", "-l", f"{crd.LABEL_REPLICA}=0")]


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Return a function: a job, its pods, and what `kubectl exec` does."""

    def serve(job: Any, pods: list[Any], does: str) -> None:
        (tmp_path / "job.json").write_text(json.dumps(job))
        (tmp_path / "pods.json").write_text(json.dumps({"items": pods}))
        fake = f"""
        case "$1 $2" in
        "get ddpjobs.ddpjob.dev") cat $HERE/job.json ;;
        "get pods") cat $HERE/pods.json ;;
        "exec -n") {does} ;;
        esac
        """
        for name, value in plugin.fake_kubectl(tmp_path, fake).items():
            monkeypatch.setenv(name, value)

    return serve


def test_the_list_of_snapshots_that_an_image_prints_moves_no_cursor(there, capfd):
    found = plugin.job()
    found["spec"]["snapshot"] = {"path": "/s"}
    there(found, [plugin.pod(0, 1)], r"printf 'STEP\n\033]52;c;aGk=\007 10\n'")
    assert cli.run(["snapshots", "j"]) == 0
    assert capfd.readouterr().out == "STEP\n?]52;c;aGk=? 10\n"


#: What `ddpjob-trainer stacks` says in each pod; that of j-1 runs torchrun.
STACKS = """\
--- rank {0}
Thread 0x7f{0} (most recent call first):
  File "/t.py", line 9 in forward
--- rank {1}
Thread 0x7f{1} (most recent call first):
  File "/t.py", line 9 in for\033[2Jward
"""


def test_stacks_of_ranks_that_are_equal_are_shown_once(tmp_path, capfd, there):
    job = plugin.job()
    job["spec"]["replicas"] = 3
    (tmp_path / "j-0").write_text(STACKS.format(0, 1))
    (tmp_path / "j-2").write_text(STACKS.format(4, 5))
    does = '[ "$7 $8 $9" = "-- ddpjob-trainer stacks" ] && cat $HERE/$4'
    there(job, [plugin.pod(n, 1) for n in range(3)], does)
    assert cli.run(["stacks", "j"]) == 0
    out, err = capfd.readouterr()
    one = '(most recent call first):\n  File "/t.py", line 9 in for'
    assert out == (
        f"--- ranks 0,4\nThread 0x7f0 {one}ward\n\n--- ranks 1,5\nThread 0x7f1 {one}?[2Jward\n\n"
    )
    assert err.startswith("j-1: ")
    assert cli.run(["stacks", "j", "--replica", "1"]) == 1


def test_a_replica_that_is_not_there_is_refused_and_snapshots_need_no_verb():
    assert gang.chosen(job(), None) == {0, 1}
    assert gang.chosen(job(), 1) == {1}
    for replica in (-1, 2):
        with pytest.raises(Failure, match=f"--replica {replica}: d has 0 to 1"):
            gang.chosen(job(), replica)
    for words in (["d"], ["ls", "d"]):
        assert cli.parser().parse_args(["snapshots", *words]).job == "d"


def test_where_pods_stand_by_each_row_says_who_serves():
    # In place, of rank 1, which the pod of seat 3 serves.
    failed = {"replica": 1, "rank": 1, "pod": "d-3", "class": "OOM", "inPlace": True}
    found = job(phase="Running", serving="1:3", failures=[failed])
    found.obj["spec"] |= {"replicas": 3, "standby": 2}
    members = {n: Member(pod(n, state={"running": {}})) for n in (0, 2, 3, 4)}
    lines = status.gang_table(found, members, {3: Report({"step": 7})}, NOW)[1:]
    assert [line.split("   ")[0] for line in lines] == [
        "0", "1 (pod 3)", "2", "standby (pod 1)", "standby (pod 4)"
    ]  # fmt: skip
    assert ["OOM" in line for line in lines] == [False, True, False, False, False]
    assert "  7  " in lines[1]
    facts = status.facts(found, members, {})["replicas"]
    assert [one.get("replica") for one in facts] == [0, 1, 2, None, None]
    assert [one.get("pod") for one in facts] == ["d-0", "d-3", "d-2", None, "d-4"]
    assert gang.chosen(found, 4) == {4}
    with pytest.raises(Failure, match="has 0 to 4"):
        gang.chosen(found, 5)
    # Without them a row is as it was, whatever a status says.
    assert gang.chosen(job(), None) == set(range(job().replicas))
    assert job(serving="x,1:").places == [(n, n) for n in range(job().replicas)]


def test_of_a_job_that_has_ended_nothing_is_expected_any_more():
    for phase, expected in (("Starting", True), ("Succeeded", False), ("Failed", False)):
        found = job(phase=phase)
        assert ("not started yet" in "\n".join(head(found))) == expected
        found.obj["spec"]["snapshot"] = {"path": "/s", "volume": {}}
        assert ("resume it, or" in pods._without_pods(found)) == expected


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (Report({"phase": "startup"}), "so none is watched for hangs: plain scripts never do"),
        (Report({"phase": "startup", "updatedAt": at(5)}), "no process has hung in the pods"),
        (Report({"phase": "step", "step": 3}), "no process has hung in the pods"),
        (Report(), "no answer from d-0: .* torchrun or python have none, and so no stacks"),
    ],
)
def test_without_stacks_it_is_said_whether_anybody_watches(say, words, monkeypatch, capsys):
    found, answers = job(phase="Running"), {("t", "d", 0): say}
    monkeypatch.setattr(gang, "find_job", lambda *_: found)
    monkeypatch.setattr(gang, "find_members", lambda *_: {0: Member(pod(state={"running": {}}))})
    monkeypatch.setattr(gang, "ask", lambda *_: (answers, ""))
    said = cli.run(["stacks", "d", "--hung"])
    out, err = capsys.readouterr()
    assert said == (not say.state)
    assert re.search(words, err if said else out)


class TestPages:
    def test_the_trainer_gives_what_is_read(self):
        exposed = {spec.exposed for spec in metrics.WORKER}
        assert gang.METRIC_SNAPSHOT_AT in exposed
        assert {"phase", "round", "attempt", "step", "totalSteps", "loss", "samplesPerSecond",
                "stepsPerSecond", "snapshotStep", "stacks",
                } <= contract.State.__annotations__.keys()  # fmt: skip

    def test_numbers_of_all_ranks_and_what_is_none_counts_for_nothing(self):
        metrics = (
            b"# HELP ddpjob_trainer_step_seconds Duration\n"
            b'ddpjob_trainer_step_seconds_count{rank="0"} 30.0\n'
            b'ddpjob_trainer_snapshot_timestamp_seconds{rank="0"} 1.767e+09\n'
            b'ddpjob_trainer_snapshot_timestamp_seconds{rank="1"} 1.766e+09\n'
        )
        told = gang.understood(b'{"step": 4, "stepsPerSecond": 2.0}', metrics)
        assert (told.rate, told.snapshot_at, told.number("step")) == (2.0, 1.767e9, 4)
        told = gang.understood(b'{"printed": {"step": 4, "loss": 0.5}}', b"")
        assert (told.number("step"), told.number("loss")) == (4, 0.5)
        for state in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
            assert gang.understood(state, b"ddpjob_trainer_step_seconds_sum ..\n") == Report()
        told = Report({"step": True, "loss": "x", "stacks": 3})
        assert (told.number("step"), told.number("loss"), told.text("stacks")) == (None, None, "")


class TestMember:
    @pytest.mark.parametrize(
        ("state", "word", "running", "started"),
        [
            ({"running": {}}, "Running", True, True),
            ({"waiting": {"reason": "ImagePullBackOff"}}, "ImagePullBackOff", False, False),
            ({"terminated": {"reason": "OOMKilled"}}, "OOMKilled", False, True),
            (None, "Running", False, False),
        ],
    )
    def test_the_trainer_container_decides(self, state, word, running, started):
        member = Member(pod(state=state))
        assert (member.state, member.running, member.started) == (word, running, started)
        assert member.ready == running
        assert (member.container, member.environment("DIR")) == ("trainer", "/s/d")

    def test_a_pod_that_goes_and_one_without_a_place(self):
        assert Member(pod(state={"running": {}}, deletionTimestamp=at(1))).state == "Terminating"
        waits = pod()
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        waits["status"] = {"phase": "Pending", "conditions": [condition]}
        assert Member(waits).state == "Unschedulable"


class TestStatus:
    def test_a_job_that_nobody_has_seen(self):
        assert status.job_row(job(), Report(), 0.0) == ["d", "-", "-", "-", "0", "-", "-", "-"]
        assert any("does it run?" in line for line in head(job()))

    def test_the_head_has_reason_budget_and_failure(self):
        found = job(
            phase="Starting", attempt=2, reason="Unschedulable", lastFailure=FAILURE,
            timings={"attemptStartedAt": at(60)}, podGroup="d-u-2",
            conditions=[
                {"type": "Stalled", "status": "True", "reason": "Unschedulable", "message": "0/3"},
                {"type": "Failed", "status": "False", "reason": "Progressing", "message": "no"},
            ],
            restarts={"total": 1, "charged": 1, "inPlace": 2},
            progress={"step": 7, "snapshotStep": 5},
        )  # fmt: skip
        lines = [
            "Job:       t/d",
            "Phase:     Starting",
            "Stalled:   Unschedulable: 0/3",
            "Attempt:   2, begun 60s ago",
            "PodGroup:  d-u-2",
            "Restarts:  1 with new pods (1 of 3 charged, 0 of 100 disruptions), 2 in place",
            "Progress:  step 7",
            "Snapshot:  step 5",
            (
                "Failure:   rank 3 in replica 1 on n2, 3m19s ago:"
                " User ExitCode1 (attempt 1, round 2; ended the attempt)"
            ),
            "           ValueError: boom",
            "           line",
        ]
        assert head(found) == lines

    def test_time_of_the_job_and_of_the_attempt(self):
        timings = {"startedAt": at(300), "attemptStartedAt": at(60)}
        runs = head(job(phase="Running", attempt=2, timings=timings))
        assert runs[2:4] == ["Time:      5m in all", "Attempt:   2, begun 60s ago"]
        timings["completedAt"] = at(30)
        ended = head(job(phase="Failed", attempt=2, timings=timings))
        assert ended[2:4] == ["Time:      4m30s in all, ended 30s ago", "Attempt:   2, took 30s"]

    def test_a_long_message_is_cut_unless_all_of_it_is_wanted(self):
        message = "\n".join("abcdefgh")
        long = {"type": "Stalled", "status": "True", "reason": "R", "message": message}
        found = job(phase="Starting", conditions=[long])
        assert "           ..." in head(found)
        whole = head(found, most=text.WHOLE)
        assert "           h" in whole
        assert "           ..." not in whole
        story = events.story(found, [event("R", 1, message=message)])
        assert "..." in events.lines(story, NOW, 80)[-1]
        assert events.lines(story, NOW, 80, text.WHOLE)[-1].strip() == "h"

    def test_for_programs_there_are_only_numbers_that_json_has(self):
        state = b'{"step": 9, "loss": NaN, "phase": "body", "stepsPerSecond": Infinity}'
        say = gang.understood(state, f"{gang.METRIC_SNAPSHOT_AT} 1.767e9\n".encode())
        members = {0: Member(pod(state={"running": {}}, uid="p"))}
        found = status.facts(job(), members, {0: say})
        assert found["replicas"] == [
            {
                "replica": 0, "pod": "d-0", "attempt": 2, "node": "n1", "state": "Running",
                "ready": True, "step": 9, "phase": "body", "snapshotTimestampSeconds": 1.767e9,
            },
            {"replica": 1},
        ]  # fmt: skip
        assert found["job"] == job().obj
        json.dumps(found, allow_nan=False)
        page = (ROOT / "docs/reference/plugin.md").read_text()
        say = Report(dict.fromkeys(status._NUMBERS, 1) | {"phase": "p"}, 1.0, 1.0)
        (one, _) = status.facts(job(), members, {0: say})["replicas"]
        assert [field for field in one if f"`{field}`" not in page] == []

    def test_failure_is_told_once(self):
        true = {"status": "True", "reason": "DeadlineExceeded", "message": "m"}
        found = job(phase="Failed", conditions=[{"type": t, **true} for t in ("Stalled", "Failed")])
        told = [line for line in head(found) if "DeadlineExceeded" in line]
        assert told == ["Failed:    DeadlineExceeded: m"]

    def test_the_trainers_word_is_newer_than_the_status_but_for_its_origin(self):
        resumed = "another DDPJob (uid a): its snapshot"
        found = job(progress={"step": 7, "totalSteps": 90, "snapshotStep": 5, "resumed": resumed})
        say = {"step": 9, "snapshotStep": 8, "resumed": {"step": 4, "uid": "a"}}
        lines = head(found, {0: Report(say, NOW.timestamp() - 4)})
        assert "Progress:  step 9/90" in lines
        assert "Snapshot:  step 8, 4s ago" in lines
        assert f"Began:     from {resumed}" in lines
        assert "Progress:  starting up" in head(job(), {0: Report({"phase": "startup"})})

    def test_a_plain_script_tells_no_steps_and_is_not_starting_up_for_ever(self):
        found = job(phase="Running")
        plain = {0: Report({"phase": "startup"})}
        words = "running, no steps yet: it starts, or is a plain script, without ddp.start() or an"
        assert f"Progress:  {words} adapter" in head(found, plain)
        ours = {0: Report({"phase": "startup", "updatedAt": at(5)})}
        assert "Progress:  starting up" in head(found, ours)
        assert [row(found, told)[5] for told in (plain, ours)] == ["-", "startup"]
        assert row(job(phase="Starting"), plain)[5] == "startup"

    def test_when_a_gang_without_pods_is_tried_again_is_told(self):
        for seconds, told in ((-240, ["Next try:  in 4m"]), (5, [])):
            found = job(phase="Restarting", timings={"nextRestartAt": at(seconds)})
            assert [line for line in head(found) if line.startswith("Next try")] == told

    def test_who_is_being_replaced_while_the_others_wait(self):
        births = {"attempt": 4, "births": "0:3,1:4,7:4", "restarts": {"total": 3, "replaced": 2}}
        found = job(phase="Starting", timings={"replacingSince": at(100)}, **births)
        lines = head(found)
        assert "Replacing: replicas 1,7, lost 100s ago; all pods restart in 3m20s" in lines
        (said,) = (line for line in lines if line.startswith("Restarts"))
        assert "3 with new pods (2 of lost pods alone, 0 of 3 charged" in said
        assert not [line for line in head(job(phase="Running", **births)) if "Replac" in line]
        lost = {**FAILURE, "replaced": True}
        assert "(attempt 1, round 2; replaced alone)" in status.failure_line(lost, NOW)
        (one,) = events.story(job(failures=[lost]), [])
        assert one.message.startswith("on n2, replaced alone\n")

    def test_in_a_stall_the_age_of_the_last_step_is_told_and_no_rate(self):
        words = {"step": 9, "samplesPerSecond": 5.0, "updatedAt": at(480)}
        found = job(phase="Running")
        assert "Progress:  step 9, last reported 8m ago" in head(found, {0: Report(words)})
        fresh = {0: Report({**words, "updatedAt": at(5)})}
        assert "Progress:  step 9, 5 samples/s" in head(found, fresh)
        assert row(found, {0: Report(words, rate=2.0)})[5:7] == ["9", "-"]

    def test_the_exception_is_shown_or_the_end_of_the_log_or_all_of_it(self):
        log = "\n".join(f"line {n}" for n in range(9))
        message = f"init container git: exit code 127\n{log}\nsh: git: not found"
        said = "init container git: exit code 127: sh: git: not found"
        found = job(lastFailure={**FAILURE, "message": message, "exception": said})
        assert head(found)[-1].strip() == said
        whole = head(found, most=text.WHOLE)
        assert [line.strip() for line in whole[-11:]] == message.splitlines()
        lines = head(job(lastFailure={**FAILURE, "message": log}))
        assert [line.strip() for line in lines][-3:] == ["line 6", "line 7", "line 8"]

    def test_a_pod_whose_init_container_failed_says_so(self):
        found = pod(state={"waiting": {"reason": "PodInitializing"}})
        found["status"]["initContainerStatuses"] = [
            {"name": name, "state": {"terminated": {"exitCode": code}}}
            for name, code in (("ok", 0), ("fetch", 6))
        ]
        assert (Member(found).state, Member(found).failed_init) == ("Init:Error", "fetch")
        found["spec"]["initContainers"] = [{"name": "fetch", "restartPolicy": "Always"}]
        assert Member(found).failed_init == "", "a native sidecar is started again"

    def test_a_row_for_each_replica_whether_it_has_a_pod_or_not(self):
        found = job(failures=[FAILURE, {**FAILURE, "exitCode": 137, "signal": 9, "class": "OOM",
                                        "reason": "OOMKilled", "detectedAt": at(5)}])  # fmt: skip
        told = {0: Report({"phase": "startup", "round": 1})}
        lines = status.gang_table(found, {0: Member(pod(state={"running": {}}))}, told, NOW)
        assert [line.split() for line in lines[1:]] == [
            ["0", "n1", "Running", "yes", "1", "startup", *["-"] * 5],
            ["1", *["-"] * 9, "OOMKilled,", "5s"],
        ]


def event(reason: str, ago: float, *, about: str = "", uid: str = "u", **more: Any) -> Any:
    kind = {"kind": "Pod", "name": about} if about else {"kind": "DDPJob", "name": "d", "uid": uid}
    return {"involvedObject": kind, "reason": reason, "message": reason.lower(),
            "lastTimestamp": at(ago), "metadata": {}, **more}  # fmt: skip


class TestStory:
    def test_causes_come_before_what_follows_in_the_same_second(self):
        found = events.story(
            job(failures=[FAILURE]),
            [event("Restarting", 200), event("Killing", 200, about="d-1"), event("Started", 800)],
        )
        assert [one.reason for one in found] == [
            "Started", "User/ExitCode1", "Restarting", "Killing",
        ]  # fmt: skip
        assert (found[1].attempt, found[1].round, found[1].replicas) == ("1", "2", (1,))

    def test_others_events_are_left_out(self):
        others = [
            event("OfBefore", 100, uid="old"),
            event("OtherJob", 100, about="d-x-1"),
            event("NoReplica", 100, about="d-2"),
            event("OfBeforeToo", 1000, about="d-1"),
            event("NoTime", 1) | {"lastTimestamp": None},
        ]
        assert events.story(job(), others) == []

    def test_the_same_of_several_replicas_is_one_line_and_counts(self):
        pulled = [
            event("Pulled", 50 - n, about=f"d-{n}", message=f"image of d-{n}") for n in (0, 1)
        ]
        backed = event("BackOff", 10, about="d-1", count=7, firstTimestamp=at(300))
        later = event("Pulled", 47 - 61, about="d-1", message="image of d-1")
        found = events.story(job(), [*pulled, backed, later])
        shown = events.lines(found, NOW, 80)
        assert [line.split()[0] for line in shown] == ["AGE", "49s", "10s", "0s"]
        assert "replicas 0-1" in shown[1]
        assert "replica 1" in shown[2]
        assert shown[1].endswith("image of <pod>")
        assert shown[2].startswith("10s (x7 over 5m)")

    def test_a_series_tells_its_last_time(self):
        series = {"count": 3, "lastObservedTime": "2026-01-01T11:59:00.000000Z"}
        times = {"eventTime": "2026-01-01T11:00:00.123456Z", "lastTimestamp": None}
        newer = {**times, "series": series}
        (one,) = events.story(job(), [event("Unhealthy", 0) | newer])
        assert (one.count, one.last) == (3, NOW - timedelta(minutes=1))
        assert events.lines([one], NOW, 80)[1].startswith("60s (x3 over 59m)")


class TestStrangers:
    """Whoever may make a pod or an Event in the namespace: nothing of theirs ends the plugin."""

    def test_numbers_that_are_none(self):
        for value in ("1e999", "-1e999", "nan", "9" * 400):
            name = f"{gang.METRIC_SNAPSHOT_AT} {value}\n".encode()
            assert gang.understood(b"{}", name).snapshot_at is None
            told = gang.understood(f'{{"round": {value.replace("nan", "NaN")}}}'.encode(), b"")
            assert told.number("round") is None
        lines = b"a{\n" * 1_000_000  # not to be searched for hours
        assert gang.understood(b"{}", lines).snapshot_at is None

    def test_words_instead_of_numbers_and_long_ones(self):
        told = {0: Report({"step": "x" * 10, "snapshotStep": ["y"], "loss": {}, "totalSteps": "z"})}
        lines = "\n".join(head(job(phase="Running"), told))
        assert "xxx" not in lines
        assert "step -" in lines
        assert len(" ".join(row(job(phase="Running"), {0: Report({"phase": "p" * 10**6})}))) < 1000

    def test_the_programs_own_numbers(self) -> None:
        answers = {0: Report({"step": 4, "metrics": {"accuracy": 0.98, "x": "y"}})}
        assert "step 4, accuracy 0.98" in "\n".join(head(job(phase="Running"), answers))
        head(job(phase="Running"), {0: Report({"metrics": ["x"]})})

    def test_pods_that_only_claim_to_be_members(self):
        ours = {"ownerReferences": [{"controller": True, "uid": "u"}]}
        assert gang._is_ours(job(), pod(**ours))
        for meta in (
            {"ownerReferences": []},
            {"ownerReferences": [{"uid": "u"}]},
            {"ownerReferences": [{"controller": True, "uid": "another"}]},
            {"name": "evil"},
            {"labels": {}},
            {"labels": {crd.LABEL_REPLICA: "0", crd.LABEL_ATTEMPT: "x"}},
        ):
            assert not gang._is_ours(job(), pod(**{**ours, **meta})), meta

    def test_events_about_nothing(self):
        for kind in ({"kind": "Pod"}, {}):
            event = {"involvedObject": kind, "lastTimestamp": at(1), "metadata": {}}
            assert events.story(job(), [event]) == []


def test_shares_of_waiting_are_of_the_steps_time():
    line = 'ddpjob_trainer_phase_seconds_total{{activity="{}",rank="{}"}} {}'
    spent = [("start", 0, 50.0), ("data", 0, 1.0), ("data", 1, 3.0), ("forward", 0, 8.0)]
    spent += [("backward", 1, 3.0), ("agreement", 0, 1.0), ("odd", 0, 9.0), ("body", 0, -1)]
    told = gang.understood(b"{}", "\n".join(line.format(*one) for one in spent).encode())
    assert (told.data, told.exchange) == (0.25, 0.25)
    assert gang.understood(b"{}", b"").exchange is None
