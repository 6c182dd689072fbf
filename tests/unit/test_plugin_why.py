"""`kubectl ddp why` and the logs of earlier attempts: what a person reads in the morning."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kubectl_ddp import cli, cures, evidence, reader
from kubectl_ddp.commands import why
from kubectl_ddp.commands.events import Happening
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Failure
from support import plugin
from support.cluster import ROOT
from support.patience import PATIENCE, wait_for

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}


def at(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(phase: str = "Running", volume: Any = CLAIM, **found: Any) -> Job:
    made = plugin.job(phase)
    made["spec"] |= {"replicas": 3, "snapshot": {"path": "/s", "volume": volume}}
    made["spec"]["template"] = {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}
    made["status"] |= {"attempt": 2, "restarts": {"charged": 1, "inPlace": 2}, **found}
    return Job(made)


def failure(seconds: float = 0, **more: Any) -> dict[str, Any]:
    found = {
        "attempt": 1, "round": 0, "replica": 1, "rank": 1, "pod": "j-1", "node": "n1",
        "class": "User", "reason": "ExitCode1", "exitCode": 1, "exception": "ValueError: boom",
        "message": "ValueError: boom\nlast of the status", "step": 12, "detectedAt": at(seconds),
    }  # fmt: skip
    return {k: v for k, v in {**found, **more}.items() if v is not None}


def incident(**more: Any) -> Any:
    first = {"rank": 1, "end": "failed", "code": 1, "step": 12, "log": ["a", "last \x1b[2Jwords"]}
    found = {
        "uid": "u", "attempt": 1, "round": 0, "began": at(-60), "at": at(0), "first": first,
        "firstReplica": 1, "firstPod": "j-1", "failed": [1], "followed": [0], "stopped": [2],
        "snapshotStep": 10, "pods": {"j-0": 0, "j-1": 1, "j-2": 2},
    }  # fmt: skip
    (checked,) = evidence.parsed(json.dumps({"incidents": [{**found, **more}]}))
    return checked


def page(found: Job, story: Any = (), incidents: Any = (), *, everything: bool = False) -> str:
    known = why.cases(found, story, incidents, everything=everything)
    return "\n".join(
        line for n, one in enumerate(known, 1) for line in why.page(found, one, n, NOW, 120)
    )


def rows(text: str) -> dict[str, str]:
    return dict(re.findall(r"^   ([A-Z][\w ]*?): +(.*)$", text, re.MULTILINE))


def test_a_failure_on_one_page():
    text = page(
        job(failures=[failure(chargedTo="maxRestarts", charge=1)]),
        [Happening(ran := NOW + timedelta(seconds=8), ran, 1, 1, (), "Running", "all run")],
        [incident(), incident(attempt=2, began=at(8), at=at(9), first=None, failed=[])],
    )
    found = rows(text)
    assert text.startswith("1. 2026-01-01 12:00:00 UTC, 0s ago (attempt 1, round 0)")
    assert found["First"] == "rank 1, replica 1, pod j-1, node n1"
    assert found["How"] == "the program ended (User, exit code 1), after step 12: ValueError: boom"
    assert "     | a\n     | last ?[2Jwords\n" in text
    assert found["Followed"] == (
        "rank 0 only lost its peers (exit code 75); rank 2 was stopped for it"
    )
    assert found["Charged"] == "restart 1 of at most 3 (maxRestarts)"
    assert found["Lost"] == (
        "2 steps, from 10 to 12 and 8s until its pods ran again (all: kubectl ddp account)"
    )
    assert found["Then"] == "all pods were made again; they ran again at 12:00:08 UTC"
    assert found["Do"].startswith("read the exception")


def test_the_status_alone_is_enough_for_a_page():
    text = page(job(failures=[failure()]))
    found = rows(text)
    assert "     | last of the status\n" in text
    assert found["Charged"] == "to maxRestarts, by its class; see Spent"
    assert found["Lost"] == "the steps from the newest snapshot to step 12"
    assert "Followed" not in found


@pytest.mark.parametrize(
    ("reason", "code", "cure"), [("OutOfcpu", None, "request less"), ("StartError", 128, "paths")]
)
def test_a_pod_that_its_node_would_not_start(reason, code, cure):
    """It was the node's doing once; again and again it is the job's."""
    lost = failure(**{"class": "Infrastructure", "reason": reason}, exitCode=code, step=None)
    found = rows(page(job(failures=[lost])))
    assert found["How"].startswith(f"its node would not start it (Infrastructure, {reason}")
    assert cure in found["Do"]


def test_one_step_is_told_of_one_failure():
    """The operator had heard of step 222 when the launcher was killed after 237."""
    killed = failure(step=222, **{"class": "Killed", "reason": "SIGKILL"})
    found = rows(page(job(failures=[killed]), incidents=[incident(step=237, snapshotStep=220)]))
    assert "after step 237" in found["How"]
    assert found["Lost"].startswith("17 steps, from 220 to 237")


def test_a_step_that_a_survivor_saved_is_repeated_by_nobody():
    killed = failure(step=237, **{"class": "Killed", "reason": "SIGKILL"})
    for saved, words in ((237, "nothing"), (235, "2 steps")):
        cause = {"savedStep": saved, "savedBy": 2}
        found = rows(page(job(failures=[killed]), incidents=[incident(step=237, cause=cause)]))
        assert found["Lost"].startswith(f"{words} repeated: saved by rank 2 after step {saved}")


def test_a_signal_from_nobody_knows_where_is_no_removal_of_the_pod():
    told = failure(**{"class": "Disruption", "reason": "SIGTERM"}, exitCode=143, signal=15)
    found = rows(page(job(failures=[told])))
    assert found["How"].startswith("SIGTERM came from somewhere, and nobody removed its pod (")
    assert found["Do"].startswith("find out who sent SIGTERM")


@pytest.mark.parametrize(
    ("cls", "reason", "code", "words"),
    [
        ("Disruption", "PodDeleted", 143, "its pod was removed"),
        ("Infrastructure", "ExitCode75", 75, "its peers were gone first"),
        ("Infrastructure", "Unknown", 255, "lost, not by the program"),
        ("User", "ExitCode255", 255, "the program ended"),
    ],
)
def test_an_end_is_told_by_its_reason(cls, reason, code, words):
    found = cures.how({"class": cls, "reason": reason, "exitCode": code})
    assert found.startswith(f"{words} ({cls}")


def test_newest_first_and_in_place_is_free():
    failures = [failure(-100), failure(-50, inPlace=True, round=1), failure(replaced=True, round=2)]
    text = page(job(failures=failures))
    assert re.findall(r"round (\d)\)", text) == ["2", "1", "0"]
    assert "nothing: it was restarted in place" in text
    assert "the processes of all pods were restarted in place" in text
    assert "only the lost pod was made again; the others waited" in text


def test_old_lines_are_not_shown_as_the_last_ones_of_a_killed_launcher():
    killed = failure(**{"class": "Killed", "reason": "SIGKILL", "exitCode": 137, "signal": 9},
                     round=None, exception=None, step=None)  # fmt: skip
    assert "Last lines, as far as they are known: they may be older" in page(job(failures=[killed]))
    first = {"rank": 1, "end": "running", "log": ["a"]}
    found = incident(first=first, failed=[], running=[1], silent={"j-1": at(-7)})
    text = page(job(failures=[killed]), incidents=[found])
    assert "Last lines as of 11:59:53, when its launcher last wrote (every 10 s at most):" in text
    assert rows(text)["Silent"] == "j-1: no word on the end of this round"


def test_two_pods_lost_at_once_are_both_named():
    lost = {"1": "was lost", "2": "was lost"}
    gone = failure(**{"class": "Disruption", "reason": "PodDeleted"}, exitCode=None, rank=None,
                   round=None, step=None, exception=None, replaced=True)  # fmt: skip
    first = {"rank": 1, "end": "running", "log": ["bye"]}
    text = page(
        job(failures=[gone]),
        incidents=[incident(first=first, failed=[], lost=lost, silent={}, running=[1, 2])],
    )
    assert rows(text)["Launchers"] == "replica 1 was lost; replica 2 was lost"
    assert "     | bye" in text


def test_a_pods_number_is_not_the_replica_that_it_served():
    standby = job(failures=[failure(pod="j-3", replica=3, rank=None, node=None)])
    standby.obj["spec"]["standby"] = 1
    assert rows(page(standby))["First"] == (
        "pod j-3, which stood by or served a replica: launchers know, the status does not"
    )
    idle = rows(page(standby, incidents=[incident()]))["First"]
    assert idle == "pod j-3, which stood by: no rank was lost"
    during = incident(round=5, began=at(-99), at=at(99), first=None, failed=[])
    standby.obj["status"]["failures"][0]["round"] = 0
    assert rows(page(standby, incidents=[during]))["First"] == idle
    serving = incident(pods={"j-0": 0, "j-3": 1}, firstPod="j-3")
    assert rows(page(standby, incidents=[serving]))["First"] == "rank 1, replica 1, pod j-3"


def test_a_round_is_found_by_its_number_or_its_time():
    later = failure(100, attempt=3, round=2)  # hub 1 lives on: pods were replaced alone
    near = incident(round=2, at=at(99))
    found = page(job(failures=[later]), incidents=[incident(round=2, at=at(-900)), near])
    assert "last ?[2Jwords" in found
    unknown = failure(100, attempt=3, round=None)
    assert "last ?[2Jwords" in page(job(failures=[unknown]), incidents=[near])
    assert "last ?[2Jwords" not in page(job(failures=[unknown]), incidents=[incident(at=at(-900))])
    assert "last ?[2Jwords" not in page(job(failures=[failure()]), incidents=[incident(attempt=2)])


def test_all_shows_what_the_status_has_forgotten():
    found = job(failures=[failure()])
    old = incident(round=7, attempt=1, at=at(-500), first={**incident()["first"], "rank": 2})
    assert "rank 2" not in rows(page(found, incidents=[incident(), old]))["First"]
    text = page(found, incidents=[incident(), old], everything=True)
    assert "2. 2026-01-01 11:51:40 UTC" in text
    assert "rank 2, replica 1, pod j-1" in text


def test_a_strangers_evidence_is_read_with_care():
    odd: list[Any] = [
        7, {"uid": "u"}, {"uid": "u", "attempt": "1", "round": 0, "began": at(0), "at": at(0)},
        {"uid": "u", "attempt": 1, "round": 0, "began": "now", "at": at(0)},
    ]  # fmt: skip
    assert evidence.parsed(json.dumps({"incidents": odd})) == []
    found = incident(
        first={"rank": "1", "log": [{"a": 1}]}, failed=["x", 3], lost={"a": 5}, silent=[],
        tails={"j-1": 5, "j-0": [7]}, cause=[], pods={"j-1": 1},
    )  # fmt: skip
    text = page(job(failures=[failure()]), incidents=[found])
    assert "rank 1, replica 1, pod j-1, node n1" in text
    assert evidence.parsed('{"incidents": 5}') == []
    for broken in ("", "[]", "{}", "[" * 100_000):
        with pytest.raises(Failure):
            evidence.parsed(broken)


# --- The job ------------------------------------------------------------------------------------


def head(found: Job, incidents: Any = ()) -> str:
    return "\n".join(why.head(found, incidents, NOW, 120))


def test_a_job_without_failures_says_what_it_does():
    text = head(job(progress={"step": 5, "totalSteps": 90, "snapshotStep": 4}))
    assert text.startswith("n/j is Running, attempt 2\n")
    assert "It has had no failure." in text
    assert rows(text)["Progress"] == "step 5/90, newest snapshot of step 4"
    chosen = job(progress={"step": 5, "snapshotStep": 4, "snapshotEvery": 120})
    assert ", newest snapshot of step 4, one about every 120 steps" in head(chosen)


def test_what_keeps_a_job_from_running_is_told_with_its_cure():
    stalled = {"type": "Stalled", "status": "True", "reason": "Unschedulable", "message": "0/2"}
    found = rows(head(job("Starting", conditions=[stalled])))
    assert found["Stalled"] == "Unschedulable: 0/2"
    assert found["Do"].startswith("add nodes or ask for less")
    assert "does the operator run?" in head(job("", attempt=None))


def test_a_suspended_job_says_what_sigterm_saved():
    told = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": ""}
    found = job("Suspended", conditions=[{**told, "lastTransitionTime": at(3)}])
    text = head(found, [incident(signal=15, snapshotStep=150)])
    assert rows(text)["Saved"] == "step 150, when it was suspended"
    later = job("Suspended", conditions=[{**told, "lastTransitionTime": at(3600)}])
    assert "Saved" not in head(later, [incident(signal=15, snapshotStep=150)]), "an old drain's"


def test_one_processs_words_are_not_put_into_anothers_mouth():
    """The operator saw pod j-2 killed; launchers noted who lost the connection to it first."""
    killed = failure(pod="j-2", replica=2, rank=None, round=None, exitCode=137, signal=9,
                     reason="SIGKILL", exception=None, step=None, message="killed",
                     **{"class": "Killed"})  # fmt: skip
    first = {"rank": 1, "end": "followed", "exception": "PeerLostError: reset", "step": 12}
    text = page(job(failures=[killed]), (), [incident(first=first)])
    assert "PeerLostError" not in text
    assert "after step" not in rows(text)["How"]


def test_the_lines_of_a_log_are_told_from_the_exception_by_the_fields():
    text = page(job(failures=[failure()]))
    assert [line.strip() for line in text.splitlines() if "|" in line] == ["| last of the status"]
    text = page(job(failures=[failure(exception=None, message="one\ntwo")]))
    assert [line.strip() for line in text.splitlines() if "|" in line] == ["| one", "| two"]
    text = page(job(failures=[failure(inPlace=True, message="ValueError: boom\nafter step 12")]))
    assert "Last lines" not in text
    assert "after step 12: ValueError: boom" in rows(text)["How"]


def test_a_failure_without_snapshots_says_so():
    found = job(failures=[failure(step=7)])
    del found.obj["spec"]["snapshot"]
    assert "there is no spec.snapshot" in rows(page(found))["Lost"]


def test_every_cure_is_for_a_reason_of_the_page():
    told_of = (ROOT / "docs" / "reference" / "reasons.md").read_text()
    known = set(re.findall(r"`(\w+)`", told_of))
    for table in (cures._OF_REASON, cures._OF_CLASS, cures._OF_CONDITION):
        assert set(table) <= known, set(table) - known
    classes = set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", told_of, re.MULTILINE))
    assert classes & set(cures._OF_CLASS) >= {"User", "Killed", "OOM", "Hang", "Hardware"}


# --- Through kubectl ----------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return plugin.answers(monkeypatch)


def test_the_right_to_get_the_job_is_enough(cluster, capsys):
    cluster["get ddpjobs.ddpjob.dev"] = job(failures=[failure()]).obj
    assert cli.run(["why", "j"]) == 0
    out = capsys.readouterr().out
    assert "rank 1, replica 1, pod j-1, node n1" in out
    assert "(without Events: you may not get events)" in out
    assert "(without what launchers kept beside the snapshots: you may not get pods)" in out


def test_where_nothing_failed_no_evidence_is_missed_and_events_are_shown(cluster, capsys):
    stalled = {"type": "Stalled", "status": "True", "reason": "ContainerCreating", "message": "x"}
    cluster["get ddpjobs.ddpjob.dev"] = job("Starting", conditions=[stalled]).obj
    words = 'MountVolume.SetUp failed for volume "files" : configmap "f" not found'
    pod = {"kind": "Pod", "name": "j-0"}
    warned = [
        {"metadata": {}, "involvedObject": pod, "reason": reason, "message": message,
         "lastTimestamp": at(seconds)}
        for reason, message, seconds in (("FailedMount", words, 9), ("BackOff", "older", 8))
    ]  # fmt: skip
    cluster["get events"] = {"items": warned}
    assert cli.run(["why", "j"]) == 0
    out = capsys.readouterr().out
    assert f"FailedMount: {words}" in " ".join(out.split())
    assert "older" not in out
    assert "It has had no failure." in out
    assert "(without" not in out


def test_a_pod_that_runs_is_asked(cluster, capsys):
    cluster["get ddpjobs.ddpjob.dev"] = job(failures=[failure()]).obj
    cluster["get events"] = {"items": []}
    cluster["get pods"] = {"items": [plugin.pod(0, 2)]}
    cluster["exec"] = json.dumps({"incidents": [incident(), incident(uid="another job", round=1)]})
    assert cli.run(["why", "j"]) == 0
    out = capsys.readouterr().out
    assert "last ?[2Jwords" in out
    assert "(without" not in out
    (words,) = [words for words in cluster["calls"] if words[0] == "exec"]
    assert words[words.index("--") + 1 :][:5] == ("ddpjob-trainer", "evidence", "ls", "--uid", "u")
    cluster["exec"] = Failure("kubectl: ddpjob-trainer: error: invalid choice: 'evidence' (choose")
    assert cli.run(["why", "j"]) == 0
    assert "keeps no evidence yet" in capsys.readouterr().out


def test_without_pods_a_reader_is_offered_and_not_made(cluster, capsys):
    cluster["get ddpjobs.ddpjob.dev"] = job("Failed", failures=[failure()]).obj
    cluster["get pods"] = {"items": []}
    assert cli.run(["why", "j"]) == 0
    assert "kubectl ddp why j --reader starts one for some seconds" in capsys.readouterr().out


@pytest.mark.parametrize(("volume", "words"), [
    ({"emptyDir": {}}, "its snapshot volume (emptyDir) went with its pods"),
    ({"ephemeral": {}}, "its snapshot volume (ephemeral) went with its pods"),
    ({}, "its spec.snapshot names no volume"),
])  # fmt: skip
def test_volumes_that_went_with_the_pods_are_named(cluster, capsys, volume, words):
    cluster["get ddpjobs.ddpjob.dev"] = job("Failed", volume).obj
    cluster["get pods"] = {"items": []}
    assert cli.run(["logs", "j", "--attempt", "1", "--rank", "0"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("given", "words"), [
    ("--attempt 1 --follow", "--follow does not go with --attempt"),
    ("--rank 0 --since 5m", "--since does not go with"),
    ("--rank 9", "--rank 9: j has 0 to 2"),
    ("--rank -1", "--rank -1: a number from 0"),
    ("--attempt 7 --rank 0", "--attempt 7: j has had 2"),
])  # fmt: skip
def test_odd_requests_are_refused_with_the_cure(cluster, capsys, given, words):
    cluster["get ddpjobs.ddpjob.dev"] = job().obj
    cluster["get pods"] = {"items": [plugin.pod(0, 2)]}
    assert cli.run(["logs", "j", *given.split()]) == 1
    assert words in capsys.readouterr().err


ORDINARY = reader.Consent()
TRUSTED = reader.Consent(trusted=True, node="n2")


def greedy(volume: Any) -> Job:
    """A job whose template asks for all that there is."""
    found = job(volume=volume)
    pod = found.obj["spec"]["template"]["spec"]
    pod |= {
        "nodeSelector": {"pool": "a"}, "tolerations": [{"operator": "Exists"}],
        "affinity": {"x": 1},
        "hostNetwork": True, "hostPID": True, "hostIPC": True, "hostUsers": True,
        "serviceAccountName": "s", "automountServiceAccountToken": True, "nodeName": "control",
        "priorityClassName": "system-node-critical", "imagePullSecrets": [{"name": "pull"}],
        "runtimeClassName": "sandbox", "volumes": [{"name": "v", "hostPath": {"path": "/"}}],
        "initContainers": [{"name": "init"}], "schedulerName": "own", "hostAliases": [{"ip": "1"}],
        "securityContext": {
            "runAsUser": 1000, "fsGroup": 7, "sysctls": [{"name": "kernel.x"}],
            "supplementalGroups": [5], "seccompProfile": {"type": "Unconfined"},
            "appArmorProfile": {"type": "Unconfined"}, "seLinuxOptions": {"type": "spc_t"},
            "runAsNonRoot": False, "runAsGroup": None,
        },
    }  # fmt: skip
    pod["containers"] = [{"name": "side"}, {
        "name": "trainer", "image": "i", "resources": {"limits": {"nvidia.com/gpu": 8}},
        "securityContext": {"privileged": True, "runAsGroup": 7, "procMount": "Unmasked",
                            "capabilities": {"add": ["ALL"]}, "allowPrivilegeEscalation": True,
                            "seLinuxOptions": {"level": "s0"}, "readOnlyRootFilesystem": False},
        "env": [{"name": "SECRET"}], "envFrom": [{"secretRef": {"name": "all"}}],
        "volumeMounts": [{"name": "v", "mountPath": "/host"}], "lifecycle": {"x": 1},
        "volumeDevices": [{"name": "v", "devicePath": "/dev/x"}], "ports": [{"hostPort": 1}],
    }]  # fmt: skip
    return found


HARDENED: dict[str, Any] = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def test_the_reader_is_given_what_is_named_here_and_nothing_else():
    made = reader.manifest(greedy(CLAIM), "r", ["c"], ORDINARY)
    resources = made["spec"]["containers"][0].pop("resources")
    assert set(resources["limits"]) == {"cpu", "memory"}
    assert made == {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "r", "namespace": "n", "labels": made["metadata"]["labels"]},
        "spec": {
            "imagePullSecrets": [{"name": "pull"}], "runtimeClassName": "sandbox",
            "securityContext": {"runAsUser": 1000, "fsGroup": 7, "supplementalGroups": [5]},
            "restartPolicy": "Never", "activeDeadlineSeconds": 300,
            "automountServiceAccountToken": False,
            "containers": [{
                "name": "reader", "image": "i", "command": ["c"],
                "securityContext": {"runAsGroup": 7, **HARDENED, "runAsNonRoot": True},
                "volumeMounts": [{"name": "snapshots", "mountPath": "/s", "readOnly": True}],
            }],
            "volumes": [{"name": "snapshots", **CLAIM}],
        },
    }  # fmt: skip


def test_a_trusted_jobs_reader_has_its_places_and_volume_and_no_rights():
    made = reader.manifest(greedy({"hostPath": {"path": "/x"}}), "r", ["c"], TRUSTED)["spec"]
    (container,) = made["containers"]
    assert container["securityContext"] == {
        "runAsGroup": 7, "seLinuxOptions": {"level": "s0"}, **HARDENED
    }  # fmt: skip
    assert made["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert made["tolerations"] == [{"operator": "Exists"}]
    assert made["nodeSelector"] == {"pool": "a", "kubernetes.io/hostname": "n2"}
    assert container["volumeMounts"] == [{"name": "snapshots", "mountPath": "/s", "readOnly": True}]
    assert not made["automountServiceAccountToken"]
    text = json.dumps(made)
    for no in ("nvidia", "SECRET", '"s"', "hostNetwork", "hostPID", "hostIPC", "privileged",
               "Unmasked", "Unconfined", "sysctls", "nodeName", "priority", '"/host"'):  # fmt: skip
        assert no not in text, no


@pytest.mark.parametrize(("volume", "words"), [
    (CLAIM, ""),
    ({"emptyDir": {}}, ""),  # mounted nowhere
    ({"hostPath": {"path": "/"}}, "its snapshot volume is of the kind hostPath"),
    *(({kind: {}}, f"of the kind {kind}") for kind in
      ("nfs", "csi", "iscsi", "cephfs", "secret", "configMap", "projected", "image", "downwardAPI",
       "kind-of-tomorrow")),
    ({**CLAIM, "hostPath": {}}, "of the kind hostPath"),
    ({**CLAIM, "name": "x"}, "of the kind name"),
])  # fmt: skip
def test_of_all_volumes_only_a_claim_is_mounted_without_more_words(volume, words):
    found = reader.objection(job(volume=volume))
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(("pod", "container", "refused"), [
    ({}, {}, False),
    ({"runAsUser": 1000}, {}, False),
    ({"runAsUser": 0}, {}, True),
    ({"runAsUser": 1000}, {"runAsUser": 0}, True),
    ({"runAsUser": 0}, {"runAsUser": 1000}, False),
    ({}, {"runAsUser": "0"}, True),
    ({}, {"runAsUser": False}, True),
    ({}, {"runAsUser": -1}, True),
    ({"runAsUser": None}, {"runAsUser": None}, False),
])  # fmt: skip
def test_root_is_refused_unless_the_job_is_trusted(
    cluster, capsys, monkeypatch, pod, container, refused
):
    made: list[Any] = []
    monkeypatch.setattr(reader, "made", lambda *words: contextlib.nullcontext(made.append(words)))
    found = job("Failed")
    template = found.obj["spec"]["template"]["spec"]
    template["securityContext"] = pod
    template["containers"][0]["securityContext"] = container
    cluster["get ddpjobs.ddpjob.dev"] = found.obj
    cluster["get pods"] = {"items": []}
    assert cli.run(["logs", "j", "--attempt", "1", "--yes"]) == 1
    said = capsys.readouterr().err
    assert ("it runs as uid" in said and "--trust-job makes it, where" in said) == refused
    assert bool(made) != refused
    assert cli.run(["logs", "j", "--attempt", "1", "--yes", "--trust-job"]) == 1
    assert len(made) == 2 - refused


def test_where_pods_took_their_disks_along_the_store_is_read():
    url = {"name": "DDPJOB_TRAINER_SNAPSHOT_UPLOAD", "value": "s3://user:password@b/j"}
    found = job(volume={"emptyDir": {}})
    pod = found.obj["spec"]["template"]["spec"]
    with pytest.raises(Failure, match="went with its pods"):
        reader.place(found)
    pod["serviceAccountName"] = "s"
    pod["containers"][0] |= {"env": [url], "envFrom": [{"secretRef": {"name": "keys"}}]}
    place = reader.place(found)
    assert place == "$(DDPJOB_TRAINER_SNAPSHOT_UPLOAD)", "the kubelet puts it in"
    made = reader.manifest(found, "r", ["c", place], ORDINARY)["spec"]
    (container,) = made["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["env"] == [url, {"name": "TMPDIR", "value": "/tmp"}]
    assert "password" not in json.dumps({**container, "env": []})
    assert "serviceAccountName" not in made
    assert reader.manifest(found, "r", [], TRUSTED)["spec"]["serviceAccountName"] == "s"
    assert made["volumes"] == [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}]
    assert reader.place(job()) == "/s/j"
    url.pop("value")
    with pytest.raises(Failure, match="went with its pods"):
        reader.place(found)
    url["valueFrom"] = "a Secret"
    assert reader.place(found) == place


#: A cluster without pods of the job: it keeps what is created, and never runs it.
FAKE = """
case "$1 $2" in
"get ddpjobs.ddpjob.dev") cat $HERE/job.json ;;
"get pods") echo '{"items": []}' ;;
"get pod") touch $HERE/waited; echo '{"metadata": {}, "spec": {}, "status": {}}' ;;
"create -n") cat > $HERE/created.new; mv $HERE/created.new $HERE/created ;;
"delete pod") echo "$@" >> $HERE/deleted ;;
esac
"""


LOGS = (sys.executable, "-m", "kubectl_ddp", "logs", "j", "--attempt", "1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_reader_is_deleted_at_the_end_also_at_ctrl_c(tmp_path, number):
    (tmp_path / "job.json").write_text(json.dumps(job("Failed").obj))
    env = plugin.fake_kubectl(tmp_path, FAKE)
    with subprocess.Popen(
        [*LOGS, "--rank", "0", "-y"], env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for((tmp_path / "waited").exists, "it to wait for its pod")
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    name = json.loads((tmp_path / "created").read_text())["metadata"]["name"]
    assert f"in pod {name}, which is deleted then" in said
    assert name in (tmp_path / "deleted").read_text()


def test_who_may_not_create_pods_hears_how_to_do_it_by_hand(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(job("Failed").obj))
    refusal = 'cannot create resource "pods" in API group "" in the namespace "n"'
    fake = FAKE.replace("cat > $HERE/created.new; mv", f"echo '{refusal}' >&2; exit 1; mv")
    env = plugin.fake_kubectl(tmp_path, fake)
    done = subprocess.run([*LOGS, "-y"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "you may not create pods in namespace n" in done.stderr
    assert (
        "by hand: `ddpjob-trainer evidence show /s/j` in a pod that mounts claim c" in done.stderr
    )


def asked(folder: Path, body: Any, answer: str | None, *more: str) -> tuple[int | None, str]:
    """Run `logs --attempt` with a terminal on which somebody answers, None: without one."""
    (folder / "job.json").write_text(json.dumps(body))
    fake = FAKE.replace('"status": {}', '"status": {"phase": "Succeeded"}')
    words, env = [*LOGS, *more], plugin.fake_kubectl(folder, fake)
    if answer is None:
        done = subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr
    ours, theirs = os.openpty()
    with subprocess.Popen(words, env=env, stdin=theirs, stderr=theirs, text=True) as process:
        os.close(theirs)
        said = ""
        while "[y/N]" not in said:
            said += os.read(ours, 4096).decode()
        os.write(ours, f"{answer}\n".encode())
        process.wait(PATIENCE)
    os.close(ours)
    return process.returncode, said


@pytest.mark.parametrize(("answer", "made"), [
    ("y", True), ("Yes", True), ("", False), ("n", False), ("yesterday", False)
])  # fmt: skip
def test_who_has_a_terminal_is_asked_before_a_pod_is_made(tmp_path, answer, made):
    code, said = asked(tmp_path, job("Failed").obj, answer)
    assert "  image   i\r\n  user    the image's, not root\r\n  volume  claim c, read-only" in said
    assert (code == 0, (tmp_path / "created").exists()) == (made, made)


def test_groups_are_shown_before_a_pod_is_made(tmp_path):
    found = job("Failed")
    context = {"runAsUser": 7, "fsGroup": 0, "supplementalGroups": [6]}
    found.spec["template"]["spec"]["securityContext"] = context
    _, said = asked(tmp_path, found.obj, None)
    assert "  user    7, groups 0, 6\n" in said


def test_who_has_none_needs_yes_and_sees_image_and_volume_too(tmp_path):
    found = job("Failed", {"persistentVolumeClaim": {"claimName": "c\x1b[2J\n  image   x"}})
    found.trainer["image"] = "evil\u202e\x1b]0;t\x07\n  image   good"
    code, said = asked(tmp_path, found.obj, None)
    assert code == 1
    assert not (tmp_path / "created").exists()
    assert "nobody can be asked here: look at image and volume above, then add --yes" in said
    assert "  image   evil??]0;t??  image   good\n" in said
    assert "claim c?[2J?  image   x, read-only\n" in said
    code, said = asked(tmp_path, found.obj, None, "--yes")
    assert (code, (tmp_path / "created").exists()) == (0, True), said
    assert "  image   evil??" in said


def test_the_url_of_uploads_is_shown_without_its_password(tmp_path):
    found = job("Failed", {"emptyDir": {}})
    url = {"name": "DDPJOB_TRAINER_SNAPSHOT_UPLOAD", "value": "s3://user:password@b/j"}
    found.trainer["env"] = [url]
    _, said = asked(tmp_path, found.obj, None)
    assert "no volume, but s3://***@b/j and the job's environment" in said
    assert "password" not in said


@pytest.mark.parametrize("words", [
    "container has runAsNonRoot and image will run as root (pod: x)",
    "container has runAsNonRoot and image has non-numeric user (me), cannot verify user",
])  # fmt: skip
def test_an_image_that_runs_as_root_is_said_with_the_flag(cluster, capsys, monkeypatch, words):
    monkeypatch.setattr(reader, "made", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(reader, "_SECONDS", 0.0)
    waiting = {"reason": "CreateContainerConfigError", "message": words}
    status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    cluster["get ddpjobs.ddpjob.dev"] = job("Failed").obj
    cluster["get pods"] = {"items": []}
    cluster["get pod"] = {"metadata": {}, "spec": {}, "status": status}
    assert cli.run(["logs", "j", "--attempt", "1", "--yes"]) == 1
    assert "Its image runs as root, or as a user without a number; --trust-job" in (
        capsys.readouterr().err
    )
