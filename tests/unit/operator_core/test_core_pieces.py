"""Tables for the pure pieces: classification, parsing of what strangers wrote, rendering."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_contract import crd
from ddpjob_operator.core import classify, render
from ddpjob_operator.core.objects import observe, ranges, spec, status
from ddpjob_operator.core.policy.restarting import restart
from support.world import START, World, job_object


def pod(state: dict[str, Any] | None = None, **changes: Any) -> observe.Pod:
    """A member on node1; ``state`` of its trainer container, ``changes`` of status or metadata."""
    meta = {
        "namespace": "ns", "name": "job-1", "uid": "u",
        "labels": {crd.LABEL_ATTEMPT: "1", crd.LABEL_REPLICA: "1"},
        **changes.pop("metadata", {}),
    }  # fmt: skip
    statuses = [] if state is None else [{"name": "trainer", "state": state, "restartCount": 0}]
    body = {"phase": "Running", "containerStatuses": statuses, **changes}
    spec_ = {"nodeName": "node1", "containers": [{"name": "side"}, {"name": "trainer"}]}
    return observe.pod({"metadata": meta, "spec": spec_, "status": body})


def exited(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


DISRUPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
DELETING = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


def init(code: int, reason: str = "Error", **more: Any) -> observe.Pod:
    """Its init container has failed, and its trainer never starts."""
    ended = {"name": "fetch", "state": exited(code, reason)}
    waiting = {"waiting": {"reason": "PodInitializing"}}
    return pod(waiting, phase="Failed", initContainerStatuses=[ended], **more)


@pytest.mark.parametrize(
    ("found", "cls", "reason"),
    [
        (pod(exited(1)), "User", "ExitCode1"),
        (pod(exited(137)), "Killed", "SIGKILL"),
        (pod(exited(139)), "User", "SIGSEGV"),
        (pod(exited(128 + 63)), "User", "Signal63"),
        (pod(exited(9, signal=9)), "Killed", "SIGKILL"),
        (pod(exited(137, "OOMKilled")), "OOM", "OOMKilled"),
        (pod(exited(137, "OOMKilled"), metadata=DELETING), "Disruption", "PodDeleted"),
        (pod(exited(2)), "Permanent", "ExitCode2"),
        (pod(exited(127, "ContainerCannotRun")), "Permanent", "ContainerCannotRun"),
        (pod(exited(128, "StartError")), "Infrastructure", "StartError"),
        (pod(exited(70)), "Diverged", "ExitCode70"),
        (pod(exited(75)), "Collateral", "ExitCode75"),
        (pod(exited(76)), "Hang", "ExitCode76"),
        (pod(exited(143)), "Collateral", "SIGTERM"),
        (pod(exited(255)), "Infrastructure", "ExitCode255"),
        (pod(exited(137, "ContainerStatusUnknown")), "Infrastructure", "ContainerStatusUnknown"),
        (pod({"terminated": {"reason": "Error"}}), "Infrastructure", "ExitCodeNone"),
        (pod(exited(1), metadata=DELETING), "Disruption", "PodDeleted"),
        (pod(exited(1), conditions=DISRUPTED), "Disruption", "EvictionByEvictionAPI"),
        (pod(None, phase="Failed", reason="Evicted"), "Disruption", "Evicted"),
        (pod(None, phase="Failed", reason="UnexpectedAdmissionError"), "Infrastructure",
         "UnexpectedAdmissionError"),
        (pod({"waiting": {}}, phase="Failed"), "Infrastructure", "NeverStarted"),
        (init(1), "User", "InitContainerFailed"),
        (init(2), "User", "InitContainerFailed"),  # as curl and others end for lack of a network
        (init(70), "User", "InitContainerFailed"),
        (init(255), "User", "InitContainerFailed"),
        (init(137), "Killed", "InitContainerFailed"),
        (init(137, "OOMKilled"), "OOM", "OOMKilled"),
        (init(128, "StartError"), "Infrastructure", "StartError"),
        (init(137, "ContainerStatusUnknown"), "Infrastructure", "ContainerStatusUnknown"),
        (init(143), "Collateral", "InitContainerFailed"),
        (init(143, metadata=DELETING), "Disruption", "PodDeleted"),
        (init(1, conditions=DISRUPTED), "Disruption", "EvictionByEvictionAPI"),
    ],
)  # fmt: skip
def test_classes(found: observe.Pod, cls: str, reason: str):
    failure = classify.failure(found, 1, START)
    assert failure is not None
    assert (failure.cls, failure.reason) == (cls, reason)


@pytest.mark.parametrize("state", [None, {"running": {}}, {"waiting": {}}, exited(0)])
def test_no_failure(state: dict[str, Any] | None):
    assert classify.failure(pod(state), 1, START) is None


def test_cause_is_the_strongest_class_then_the_earliest():
    def loss(replica: int, cls: str) -> status.Failure:
        return status.Failure(1, replica, cls, "", "", START)

    losses = [loss(0, "Collateral"), loss(1, "User"), loss(2, "User"), loss(3, "Disruption")]
    at = {1: datetime(2026, 1, 1, 0, 0, 9, tzinfo=UTC), 2: START, 3: None}
    assert classify.cause(losses, at) == losses[2]
    assert classify.cause([], {}) is None


def test_the_report_of_the_launcher_explains_the_failure():
    report = {
        "version": 1, "kind": "exception", "rank": 5, "code": 1, "round": 2, "step": 7,
        "loss": 0.5, "snapshotStep": 4, "exception": "ValueError: no", "log": ["a", "b\x1b[31m"],
    }  # fmt: skip
    failure = classify.failure(pod(exited(1, message=json.dumps(report))), 2, START)
    assert failure is not None
    assert (failure.rank, failure.round) == (5, 2)
    assert failure.message == "ValueError: no\na\nb\N{REPLACEMENT CHARACTER}[31m"


def test_the_exception_is_quoted_wherever_a_failure_is_told():
    error = "ValueError: bad shape of " + "x" * 300 + " and (2x3)"
    report = {"version": 1, "kind": "exception", "code": 1, "exception": error[:300]}
    failure = classify.failure(pod(exited(1, message=json.dumps(report))), 1, START)
    assert failure is not None
    assert failure.exception.startswith("ValueError: bad shape of x")
    assert len(failure.exception) == 160
    assert f": {failure.exception}, exit code 1 [User]" in restart.describe(failure)
    assert failure.message.startswith("ValueError: bad shape")


def test_an_exception_is_found_in_the_log_of_a_program_without_launcher():
    log = (
        "Traceback (most recent call last):\n  File 'x'\n[rank0]: my.lib.OddError: no\nbye\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=== FAILED"
    )
    failure = classify.failure(pod(exited(1, message=log)), 1, START)
    assert failure is not None
    assert failure.exception == "my.lib.OddError: no"
    assert failure.message.startswith("my.lib.OddError: no\nTraceback")


@pytest.mark.parametrize("code", [1, 2, 127])
@pytest.mark.parametrize("reported", [False, True])
def test_the_last_line_says_why_a_command_was_refused(code: int, reported: bool):
    said = ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --lrr"]
    report = json.dumps({"version": 1, "kind": "exit", "code": code, "log": said})
    failure = classify.failure(
        pod(exited(code, message=report if reported else "\n".join(said))), 1, START
    )
    assert failure is not None
    assert failure.exception == ("" if code == 1 else said[-1])


def test_a_failed_init_container_is_told_with_its_last_line():
    ended = {"exitCode": 6, "reason": "Error", "message": "fetching\ncurl: no such host"}
    init = [{"name": "fetch", "state": {"terminated": ended}}]
    found = pod(
        {"waiting": {"reason": "PodInitializing"}}, phase="Failed", initContainerStatuses=init
    )
    failure = classify.failure(found, 1, START)
    assert failure is not None
    assert failure.exception == "init container fetch: exit code 6: curl: no such host"
    assert failure.exception in restart.describe(failure)


def test_the_cause_and_the_end_of_a_long_log_are_shown():
    log = [f"line {i} {'x' * 100}" for i in range(19)] + ["stack: sleep (loader.py:12)"]
    report = {"version": 1, "kind": "hang", "code": 76, "exception": "Hang: rank 1", "log": log}
    failure = classify.failure(pod(exited(76, message=json.dumps(report))), 1, START)
    assert failure is not None
    first, *rest = failure.message.splitlines()
    assert first == "Hang: rank 1"
    assert rest == log[-len(rest) :]
    assert observe.MESSAGE_MAX - 120 < len(failure.message) <= observe.MESSAGE_MAX


@pytest.mark.parametrize(
    "message",
    [
        "Traceback: boom", "{not json", '{"version": 9}', "[1]", '{"a":' * 5000 + "1",
        '{"version": 1, "rank": -1, "log": {}, "loss": 1e999, "step": true, "exception": 7}',
    ],
)  # fmt: skip
def test_last_words_of_strangers_never_raise(message: str):
    failure = classify.failure(pod(exited(1, message=message)), 1, START)
    assert failure is not None
    assert failure.rank == 1
    assert len(failure.message) <= observe.MESSAGE_MAX


def test_the_rank_is_unknown_with_several_processes_and_no_report():
    failure = classify.failure(pod(exited(1)), 8, START)
    assert failure is not None
    assert failure.rank is None


@pytest.mark.parametrize(
    ("raw", "loss"),
    [({"loss": 1}, 1.0), ({"loss": 0.0007893476}, 0.000789348),
      ({"loss": float("nan")}, None), ({"loss": 10**400}, None),
     ({"loss": "1"}, None), ({"loss": True}, None)],
)  # fmt: skip
def test_progress_of_a_stranger(raw: dict[str, Any], loss: float | None):
    found = observe.progress(raw, START)
    assert found is not None
    assert found.loss == loss


def test_status_survives_a_round_trip():
    world = World(job_object(suspend=False)).settle().run().end(1, 137)
    assert status.to_dict(status.from_dict(world.status)) == world.status


@pytest.mark.parametrize(
    "raw",
    [None, [], {"phase": 7, "conditions": [1, {"type": "A"}], "failures": [{}], "attempt": "x",
     "progress": {"loss": "x"}, "timings": {"startedAt": "yesterday", "runningAt": "2026-01-01"},
     "succeededReplicas": "0-99999999"}],
)  # fmt: skip
def test_a_status_that_makes_no_sense_counts_as_none(raw: object):
    found = status.from_dict(raw)
    assert (found.phase, found.conditions, found.failures) == (None, (), ())
    assert found.succeeded == frozenset()


@pytest.mark.parametrize(
    ("text", "found"), [("0-2,5", {0, 1, 2, 5}), ("", set()), ("a", set()), (None, set())]
)
def test_ranges(text: object, found: set[int]):
    assert ranges.parse_ranges(text) == found
    if found:
        assert ranges.format_ranges(frozenset(found)) == text


@pytest.mark.parametrize(
    ("nproc", "limits", "expected"),
    [("auto", {}, 1), ("auto", {"nvidia.com/gpu": "8"}, 8), ("auto", {"nvidia.com/gpu": 2}, 2),
     ("auto", {"nvidia.com/gpu": "0"}, 1), (4, {}, 4), ("4", {}, 4), (2, {"nvidia.com/gpu": 4}, 2),
     (3, {"nvidia.com/gpu": "0"}, 3), (3, {"nvidia.com/mig-1g.5gb": 1}, 3),
     ("auto", {"amd.com/gpu": 8}, 8), ("auto", {"gpu.intel.com/xe": 4, "cpu": 1}, 4),
     ("auto", {"nvidia.com/gpu": "0", "amd.com/gpu": 4}, 4),
     ("auto", {"nvidia.com/gpu": "0k", "amd.com/gpu": 4}, 4), ("auto", {"nvidia.com/gpu": None}, 1),
     ("auto", {"nvidia.com/gpu": "0e5"}, 1), ("auto", {"amd.com/gpu": "0.0"}, 1),
     (4, {"nvidia.com/gpu": "8000m"}, 4), ("auto", {"nvidia.com/gpu": "08"}, 8),
     ("auto", {"gpu.intel.com/i915": "2"}, 2), ("auto", {"nvidia.com/mig-1g.5gb": 2}, 1)],
)  # fmt: skip
def test_nproc_per_node(nproc: object, limits: dict[str, Any], expected: int):
    template = {"spec": {"containers": [{"name": "t", "resources": {"limits": limits}}]}}
    found = spec.parse({"nprocPerNode": nproc, "template": template, "replicas": 2})
    assert found.nproc_per_node == expected


@pytest.mark.parametrize("kind", ["nvidia.com/gpu", "amd.com/gpu"])
@pytest.mark.parametrize(("nproc", "gpus"), [(8, "4"), ("2", 1), (3, "2")])
def test_more_processes_than_gpus_are_refused(nproc: object, gpus: object, kind: str):
    template = {"spec": {"containers": [{"name": "t", "resources": {"limits": {kind: gpus}}}]}}
    says = rf"spec\.nprocPerNode is {nproc}, but the limit {kind} .* is {gpus},"
    with pytest.raises(spec.SpecError, match=says):
        spec.parse({"nprocPerNode": nproc, "template": template, "replicas": 2})


@pytest.mark.parametrize("gpus", ["8.0", "8e0", "8000m", "+8", "0.008k", 8.0, "9" * 5000])
def test_a_count_of_gpus_in_another_spelling_is_not_one_process(gpus: object):
    limits = {"nvidia.com/gpu": 0, "amd.com/gpu": gpus}
    template = {"spec": {"containers": [{"name": "t", "resources": {"limits": limits}}]}}
    with pytest.raises(spec.SpecError, match=r"amd\.com/gpu .* plain number, or set nprocPerNode"):
        spec.parse({"template": template, "replicas": 2})


def render_pod(template: dict[str, Any], **more: Any) -> dict[str, Any]:
    obj = job_object(template=template, **more)
    return render.pod(observe.job(obj), spec.parse(obj["spec"]), 3, 1)


def test_the_environment_of_the_contract():
    template = {"spec": {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "b"}]}]}}
    body = render_pod(
        template, nprocPerNode=1, snapshot={"path": "/s/", "volume": {"emptyDir": {}}}
    )
    env = {e["name"]: e["value"] for e in body["spec"]["containers"][0]["env"]}
    assert env["MASTER_ADDR"] == env["PET_MASTER_ADDR"] == "job-0.job.ns.svc"
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "3", "0")
    assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_RDZV_ID"]) == (
        "3", "1", "uid-of-job-3")  # fmt: skip
    assert (env[contract.ATTEMPT], env[contract.REPLICA]) == ("3", "1")
    assert env[contract.SNAPSHOT_DIR] == "/s/job"
    assert body["spec"]["containers"][0]["env"][-1] == {"name": "A", "value": "b"}
    reserved = set(contract.RESERVED_ENV)
    ours = {name for name in env if name != "A" and name != "PYTHONUNBUFFERED"}
    assert all(name in reserved or name.startswith(contract.OWN_PREFIX) for name in ours)


def test_ranks_are_left_to_the_launcher_with_several_processes_per_pod():
    body = render_pod({"spec": {"containers": [{"name": "t"}]}}, nprocPerNode=2)
    names = {e["name"] for e in body["spec"]["containers"][0]["env"]}
    assert not names & set(contract.PROCESS_ENV)


def test_what_the_user_wrote_is_kept():
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"x": "y"}},
        "spec": {
            "containers": [
                {"name": "side", "image": "s"},
                {
                    "name": "trainer",
                    "env": [{"name": "PYTHONUNBUFFERED", "value": "0"}],
                    "terminationMessagePolicy": "File",
                    "volumeMounts": [{"name": "mine", "mountPath": "//dev/shm/"}],
                    "x-unknown": {"deep": [1]},
                },
            ],
            "volumes": [{"name": "mine", "emptyDir": {}}],
            "automountServiceAccountToken": True,
            "tolerations": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}],
        },
    }
    before = json.dumps(template)
    body = render_pod(template)
    assert json.dumps(template) == before
    trainer = body["spec"]["containers"][1]
    assert [e["value"] for e in trainer["env"] if e["name"] == "PYTHONUNBUFFERED"] == ["0"]
    assert trainer["terminationMessagePolicy"] == "File"
    assert trainer["x-unknown"] == {"deep": [1]}
    assert body["spec"]["volumes"] == template["spec"]["volumes"]  # type: ignore[index]
    assert body["spec"]["automountServiceAccountToken"] is True
    assert body["spec"]["containers"][0] == {"name": "side", "image": "s"}
    assert [t["key"] for t in body["spec"]["tolerations"]] == [
        "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"]  # fmt: skip
    assert body["metadata"]["labels"]["team"] == "a"
    assert body["metadata"]["annotations"]["x"] == "y"


@pytest.mark.parametrize(
    "wrong", [{"key": "gpu"}, ["gpu"], [{"operator": "Exists"}, None], "gpu", 5], ids=str
)
def test_tolerations_that_are_none_are_left_for_the_api_server_to_name(wrong):
    """The definition does not type them; the planner failed on them, and the job was silent."""
    body = render_pod({"spec": {"containers": [{"name": "t"}], "tolerations": wrong}})
    assert body["spec"]["tolerations"] == wrong


def test_a_field_that_is_null_asks_for_nothing():
    """As kubectl sees it. A token of the namespace's account would be mounted otherwise."""
    null = {"automountServiceAccountToken": None, "enableServiceLinks": None, "dnsPolicy": None}
    trainer = {"name": "t", "terminationMessagePolicy": None}
    spec_ = {"containers": [trainer], "hostNetwork": True, "tolerations": None, **null}
    body = render_pod({"spec": spec_})["spec"]
    assert (body["automountServiceAccountToken"], body["enableServiceLinks"]) == (False, False)
    assert body["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert body["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert len(body["tolerations"]) == 2


def test_the_pod_is_ours_and_never_restarts_by_itself():
    body = render_pod({"spec": {"containers": [{"name": "t"}]}})
    assert body["spec"]["restartPolicy"] == "Never"
    assert body["spec"]["automountServiceAccountToken"] is False
    assert (body["spec"]["hostname"], body["spec"]["subdomain"]) == ("job-1", "job")
    (owner,) = body["metadata"]["ownerReferences"]
    assert owner["controller"] is True
    assert observe.pod({**body, "metadata": {**body["metadata"], "uid": "u"}}).attempt == 3


def test_an_image_that_cannot_be_pulled_is_seen_on_any_container():
    waiting = {"name": "init", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}
    found = pod({"waiting": {"reason": "PodInitializing"}}, initContainerStatuses=[waiting])
    assert (found.waiting_reason, found.waiting_message) == ("ImagePullBackOff", "no")
    assert pod({"waiting": {"reason": "ContainerCreating"}}).waiting_reason == ""


@pytest.mark.parametrize(("given", "grace"), [({}, 30), (0, 1), (-5, 1), (600, 600), ("x", 30)])
def test_a_pod_is_there_for_as_long_as_its_containers_may_run(given: object, grace: int):
    """Without a grace period its object goes first, and the barrier would see nothing."""
    body = {"containers": [{"name": "t"}]}
    more = {} if given == {} else {"terminationGracePeriodSeconds": given}
    found = render_pod({"spec": {**body, **more}})["spec"]
    assert found["terminationGracePeriodSeconds"] == grace
    env = {v["name"]: v["value"] for v in found["containers"][0]["env"]}
    assert env[contract.GRACE_SECONDS] == str(grace)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [{"name": "metrics", "containerPort": 9400}]),
        ([{"containerPort": 80}],
         [{"containerPort": 80}, {"name": "metrics", "containerPort": 9400}]),
        ([{"containerPort": 9400}], [{"containerPort": 9400}]),
        ([{"name": "metrics", "containerPort": 80}], [{"name": "metrics", "containerPort": 80}]),
    ],
)  # fmt: skip
def test_the_metrics_port_is_declared_unless_the_template_has_one(given: object, expected: object):
    container = {"name": "trainer", "image": "i", **({"ports": given} if given else {})}
    obj = job_object(template={"spec": {"containers": [container]}})
    body = render.pod(observe.job(obj), spec.parse(obj["spec"]), 1, 0)
    assert body["spec"]["containers"][0]["ports"] == expected
