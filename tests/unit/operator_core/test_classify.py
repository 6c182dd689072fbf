"""What a pod's end is judged by: tables over pods as kubelets really write them.

Kubernetes 1.36 with containerd 2. The whole status goes through observe.pod, so that each table
holds for what the API server shows.
"""

import json
import tracemalloc
from datetime import timedelta
from typing import Any

import pytest

from ddpjob_contract import crd
from ddpjob_operator.core import evidence, failure_text
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects.status import Failure
from support.world import START, World, running

AT = "2026-01-01T00:00:00Z"
DELETED = {"deletionTimestamp": AT, "deletionGracePeriodSeconds": 30}
EVICTION = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting", "lastTransitionTime": AT}  # fmt: skip
PRESSURE = EVICTION | {"reason": "TerminationByKubelet"}
LOW = ("The node was low on resource: ephemeral-storage. "
       "Threshold quantity: 1Gi, available: 900Mi. Container trainer was using 5Gi, request is 0, "
       "has larger consumption of ephemeral-storage. ")  # fmt: skip


def ended(code: int, reason: str = "Error", message: str = "", **more: Any) -> dict[str, Any]:
    """The trainer container's status after its end."""
    state = {"exitCode": code, "reason": reason, "startedAt": AT, "finishedAt": AT,
             "containerID": "containerd://1", **more}  # fmt: skip
    state |= {"message": message} if message else {}
    return {"name": "trainer", "ready": False, "started": False, "restartCount": 0,
            "lastState": {}, "state": {"terminated": state}}  # fmt: skip


def report(kind: str, code: int, **more: Any) -> str:
    """The launcher's last words."""
    return json.dumps({"version": 1, "kind": kind, "code": code, "round": 1, **more})


def pod(
    container: dict[str, Any],
    *,
    phase: str = "Failed",
    meta: dict[str, Any] | None = None,
    disrupted: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """The Pod object. ``disrupted``: its DisruptionTarget. ``trainer``: more of its spec."""
    gone = {"status": "False", "reason": "PodFailed", "lastTransitionTime": AT}
    conditions = [{"type": "Ready", **gone}, {"type": "ContainersReady", **gone},
                  {"type": "PodScheduled", "status": "True", "lastTransitionTime": AT},
                  *([disrupted] if disrupted else [])]  # fmt: skip
    labels = {crd.LABEL_ATTEMPT: "1", crd.LABEL_REPLICA: "1"}
    return {
        "metadata": {"namespace": "ns", "name": "job-1", "uid": "u", "labels": labels,
                     **(meta or {})},
        "spec": {"nodeName": "node1", "restartPolicy": "Never",
                 "containers": [{"name": "trainer", "image": "trainer:1", **(trainer or {})}]},
        "status": {"phase": phase, "qosClass": "BestEffort", "startTime": AT,
                   "conditions": conditions, "containerStatuses": [container], **status},
    }  # fmt: skip


def init_failed(code: int, reason: str = "Error", message: str = "", **more: Any) -> dict[str, Any]:
    """Its trainer never starts."""
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    return pod(waiting, initContainerStatuses=[{**ended(code, reason, message), "name": "fetch"}],
               **more)  # fmt: skip


def failure(raw: dict[str, Any], nproc: int = 1) -> Failure:
    found = evidence.failure(observe.pod(raw), nproc, START)
    assert found is not None
    return found


def judged(raw: dict[str, Any]) -> tuple[str, str]:
    found = failure(raw)
    return found.cls, found.reason


@pytest.mark.parametrize(
    ("raw", "judgement"),
    [
        (pod(ended(1)), ("User", "ExitCode1")),
        (pod(ended(137)), ("Killed", "SIGKILL")),
        (pod(ended(139)), ("User", "SIGSEGV")),
        (pod(ended(128 + 63)), ("User", "Signal63")),
        (pod(ended(9, signal=9)), ("Killed", "SIGKILL")),
        (pod(ended(2)), ("Permanent", "ExitCode2")),
        (pod(ended(127, "ContainerCannotRun")), ("Permanent", "ContainerCannotRun")),
        (pod(ended(70)), ("Diverged", "ExitCode70")),
        (pod(ended(75)), ("Collateral", "ExitCode75")),
        (pod(ended(76)), ("Hang", "ExitCode76")),
        (pod(ended(143)), ("Collateral", "SIGTERM")),
        (pod(ended(255)), ("User", "ExitCode255")),  # sys.exit(-1)
        (pod(ended(255, "Unknown")), ("Infrastructure", "Unknown")),  # the machine crashed
        (pod(ended(75, message=report("exit", 75))), ("User", "ExitCode75")),  # the program's own
        (pod(ended(75, message=report("peerLost", 75))), ("Collateral", "ExitCode75")),
        # `run train.py | tee log`, `run train.py; echo over`
        (pod(ended(0, "Completed", report("exception", 1)), phase="Succeeded"),
         ("User", "ExitCode1")),
        (pod(ended(0, "Completed", report("exit", 64)), phase="Succeeded"),
         ("Permanent", "ExitCode64")),
        (pod(ended(0, "Completed", report("peerLost", 75)), phase="Succeeded"),
         ("Collateral", "ExitCode75")),
        (pod(ended(0, "Completed", report("sigterm", 143)), phase="Succeeded"),
         ("Collateral", "SIGTERM")),
        (pod(ended(137, "ContainerStatusUnknown")), ("Infrastructure", "ContainerStatusUnknown")),
        (pod({"name": "trainer", "state": {"terminated": {"reason": "Error"}}}),
         ("Infrastructure", "ExitCodeNone")),
        (pod(ended(1), meta=DELETED), ("Disruption", "PodDeleted")),
        (pod(ended(1), disrupted=EVICTION), ("Disruption", "EvictionByEvictionAPI")),
        (pod({}, reason="Evicted"), ("Disruption", "Evicted")),
        # The template's own activeDeadlineSeconds.
        (pod(ended(143), reason="DeadlineExceeded", message="Pod was active on the node longer "
             "than the specified deadline"), ("User", "DeadlineExceeded")),
        (pod({}, reason="UnexpectedAdmissionError"),
         ("Infrastructure", "UnexpectedAdmissionError")),
        (pod({"name": "trainer", "state": {"waiting": {}}}), ("Infrastructure", "NeverStarted")),
        *[(init_failed(code), ("User", "InitContainerFailed")) for code in (1, 2, 70, 255)],
        (init_failed(137), ("Killed", "InitContainerFailed")),
        (init_failed(137, "OOMKilled"), ("OOM", "OOMKilled")),
        (init_failed(137, "ContainerStatusUnknown"), ("Infrastructure", "ContainerStatusUnknown")),
        (init_failed(143), ("Collateral", "InitContainerFailed")),
        (init_failed(143, meta=DELETED), ("Disruption", "PodDeleted")),
        (init_failed(1, disrupted=EVICTION), ("Disruption", "EvictionByEvictionAPI")),
    ],
)  # fmt: skip
def test_classes(raw, judgement):
    assert judged(raw) == judgement


def test_a_command_that_hides_the_launchers_failure_is_named_with_the_cure():
    last = report("exception", 1, exception="ValueError: no")
    found = failure(pod(ended(0, "Completed", last), phase="Succeeded"))
    assert found.exception == "ValueError: no"
    assert "exit code 0, which hides" in found.message
    assert "pipefail" in found.message


SUCCEEDED = ended(0, "Completed", json.dumps({"version": 1, "kind": "success", "round": 0}))


@pytest.mark.parametrize(
    "state", [{}, {"running": {}}, {"waiting": {}}, ended(0)["state"], SUCCEEDED["state"]]
)
def test_no_failure(state):
    raw = pod({"name": "trainer", "state": state}, phase="Running")
    assert evidence.failure(observe.pod(raw), 1, START) is None


def test_the_cause_is_the_strongest_class_then_the_earliest():
    def loss(replica: int, cls: str) -> Failure:
        return Failure(1, replica, cls, "", "", START)

    losses = [loss(0, "Collateral"), loss(1, "User"), loss(2, "User"), loss(3, "Disruption")]
    assert evidence.cause(losses, {1: START + timedelta(seconds=9), 2: START, 3: None}) == losses[2]
    killed, failed = loss(2, "Killed"), loss(0, "User")  # of a peer that it took along
    assert evidence.cause([failed, killed], {0: START, 2: START + timedelta(seconds=1)}) == killed
    assert evidence.cause([], {}) is None


def test_the_report_of_the_launcher_explains_the_failure():
    said = report("exception", 1, rank=5, exception="ValueError: no", log=["a", "b\x1b[31m"])
    found = failure(pod(ended(1, message=said)), 2)
    assert (found.rank, found.round) == (5, 1)
    assert found.message == "ValueError: no\na\nb\N{REPLACEMENT CHARACTER}[31m"
    assert failure(pod(ended(1)), 8).rank is None  # of several processes, without a report


USAGE = ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --lrr"]
LONG = ("ValueError: bad shape of " + "x" * 300 + " and (2x3)")[:300]
LOG = (
    "Traceback (most recent call last):\n  File 'x'\n[rank0]: my.lib.OddError: no\nbye\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=== FAILED"
)


@pytest.mark.parametrize(
    ("raw", "quoted"),
    [
        (pod(ended(1, message=report("exception", 1, exception=LONG))), LONG[:100]),
        (pod(ended(1, message=LOG)), "my.lib.OddError: no"),  # of a program without a launcher
        *[(pod(ended(code, message=said)), USAGE[-1] if code > 1 else "") for code in (1, 2, 127)
          for said in ("\n".join(USAGE), report("exit", code, log=USAGE))],
        (init_failed(6, message="fetching\ncurl: no such host"),
         "init container fetch: exit code 6: curl: no such host"),
    ],
)  # fmt: skip
def test_what_says_why_is_quoted_in_one_line(raw, quoted):
    found = failure(raw)
    assert found.exception.startswith(quoted)
    assert bool(found.exception) == bool(quoted)
    assert len(found.exception) <= 160
    assert found.exception in failure_text.describe(found)


def test_the_cause_and_the_end_of_a_long_log_are_shown():
    log = [f"line {i} {'x' * 100}" for i in range(19)] + ["stack: sleep (loader.py:12)"]
    said = report("hang", 76, exception="Hang: rank 1", log=log)
    found = failure(pod(ended(76, message=said)))
    first, *rest = found.message.splitlines()
    assert (first, rest) == ("Hang: rank 1", log[-len(rest) :])
    assert observe.MESSAGE_MAX - 120 < len(found.message) <= observe.MESSAGE_MAX


@pytest.mark.parametrize(
    "message",
    [
        "Traceback: boom", "{not json", '{"version": 9}', "[1]", '{"a":' * 5000 + "1",
        '{"version": 1, "rank": -1, "log": {}, "loss": 1e999, "step": true, "exception": 7}',
    ],
)  # fmt: skip
def test_last_words_of_strangers_never_raise(message):
    found = failure(pod(ended(1, message=message)))
    assert (found.rank, len(found.message) <= observe.MESSAGE_MAX) == (1, True)


def test_a_strangers_text_is_cut_before_it_is_walked():
    """A message of the largest pod takes the memory of what is kept, and so its time."""
    text = "\x1b\u202e" * 700_000
    tracemalloc.start()
    try:
        shown = observe.clean(text, 300)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shown == "\N{REPLACEMENT CHARACTER}" * 299 + "\N{HORIZONTAL ELLIPSIS}"
    assert peak < 64 << 10
    assert observe.clean(" \n a\tb\nc \n", 99) == "a\N{REPLACEMENT CHARACTER}b\nc"
    assert (observe.clean("12345678", 8), observe.clean("123456789", 8)) == ("12345678", "1234567…")
    assert observe.clean("\n" * 2000 + "word", 300) == "word"


def test_an_image_that_cannot_be_pulled_is_seen_on_any_container():
    waiting = {"name": "init", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}
    creating = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    found = observe.pod(pod(creating, phase="Pending", initContainerStatuses=[waiting]))
    assert (found.waiting_reason, found.waiting_message) == ("ImagePullBackOff", "no")
    assert observe.pod(pod(creating, phase="Pending")).waiting_reason == ""


def test_a_container_that_a_webhook_puts_first_is_not_the_trainer():
    raw = pod({**ended(1), "name": "main"}, meta={"annotations": {crd.ANNOTATION_TRAINER: "main"}})
    raw["spec"]["containers"] = [{"name": "proxy"}, {"name": "main"}]
    assert observe.pod(raw).trainer.exit_code == 1


OOM = "OOMKilled"
WORDS = "out of memory (limit 2 GiB, peak 2 GiB): the kernel killed it"
LIMITED = {"resources": {"limits": {"memory": "2Gi"}}}
KILLED = report("signal", 137, signal=9, rank=1)
SIGTERM = report("sigterm", 143, signal=15)
RAISED = report("exception", 1, exception="ValueError: no")


@pytest.mark.fault("N5")
@pytest.mark.parametrize(
    ("raw", "judgement"),
    [
        # Known before the end. containerd calls it OOMKilled once anything in it was killed so.
        (pod(ended(143, OOM, SIGTERM), meta=DELETED), ("Disruption", "PodDeleted")),
        (pod(ended(137, OOM), meta=DELETED), ("Disruption", "PodDeleted")),
        (pod(ended(143, OOM), disrupted=EVICTION), ("Disruption", "EvictionByEvictionAPI")),
        (pod(ended(75, OOM), disrupted=EVICTION), ("Disruption", "EvictionByEvictionAPI")),
        (pod(ended(0, OOM), disrupted=PRESSURE, reason="Evicted", message=LOW),
         ("Disruption", "Evicted")),
        (pod(ended(137, OOM), disrupted=PRESSURE, reason="Terminated"),
         ("Disruption", "Terminated")),
        (pod(ended(1, OOM), reason="NodeShutdown"), ("Disruption", "NodeShutdown")),
        (pod(ended(137, OOM), reason="Preempting"), ("Disruption", "Preempting")),
        # The launcher's report: what ended was no victim of the kernel, unless by SIGKILL.
        (pod(ended(137, OOM, KILLED)), ("OOM", OOM)),
        (pod(ended(1, OOM, RAISED)), ("User", "ExitCode1")),
        (pod(ended(139, OOM, report("signal", 139, signal=11))), ("User", "SIGSEGV")),
        (pod(ended(76, OOM, report("hang", 76))), ("Hang", "ExitCode76")),
        (pod(ended(75, OOM, report("peerLost", 75))), ("Collateral", "ExitCode75")),
        (pod(ended(143, OOM, SIGTERM)), ("Collateral", "SIGTERM")),
        # It was told to end, and ended its worker by SIGKILL.
        (pod(ended(143, OOM, report("sigterm", 137))), ("Collateral", "SIGTERM")),
        # No report: a code that means something is no death for memory.
        (pod(ended(137, OOM)), ("OOM", OOM)),
        (pod(ended(1, OOM)), ("OOM", OOM)),  # as torchrun ends of a rank that was killed
        (pod(ended(255, OOM)), ("OOM", OOM)),
        (pod(ended(75, OOM)), ("Collateral", "ExitCode75")),
        (pod(ended(143, OOM)), ("Collateral", "SIGTERM")),
        (pod(ended(70, OOM)), ("Diverged", "ExitCode70")),
        (pod(ended(74, OOM)), ("Hardware", "ExitCode74")),
        (pod(ended(76, OOM)), ("Hang", "ExitCode76")),
        *[(pod(ended(code, OOM)), ("Permanent", f"ExitCode{code}")) for code in
          (2, 64, 78, 126, 127)],
        # The launcher has read the kernel's counters, whatever the kubelet calls its end.
        (pod(ended(137, "Error", report("oom", 137, signal=9, exception=WORDS))), ("OOM", OOM)),
        (pod(ended(137, OOM, report("oom", 137, signal=9, exception=WORDS))), ("OOM", OOM)),
        (pod(ended(1, "Error", report("oom", 1, exception=WORDS))), ("OOM", OOM)),
        (pod(ended(137, "Error", report("oom", 137)), meta=DELETED), ("Disruption", "PodDeleted")),
        (pod(ended(137, "Error", KILLED)), ("Killed", "SIGKILL")),
    ],
)  # fmt: skip
def test_an_out_of_memory_is_the_end_only_if_it_was_not_survived(raw, judgement):
    assert judged(raw) == judgement


@pytest.mark.fault("N5")
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (pod(ended(137, "Error", report("oom", 137, exception=WORDS))), WORDS),
        # Of a container that was killed as a whole, as with version 2 of cgroups.
        (pod(ended(137, OOM), trainer=LIMITED),
         "out of memory (limit 2Gi): the kernel killed it: raise resources.limits.memory"),
        (pod(ended(137, OOM, "step 7"), trainer=LIMITED), "out of memory (limit 2Gi): "),
        (pod(ended(137, OOM, KILLED), trainer=LIMITED), "out of memory (limit 2Gi): "),
        (pod(ended(137, OOM)),
         "out of memory (no memory limit): the kernel killed it: raise resources.requests."),
    ],
)  # fmt: skip
def test_an_out_of_memory_is_told_with_its_limit_and_the_cure(raw, words):
    found = failure(raw)
    assert found.exception.startswith(words)
    assert found.message.startswith(words)
    assert ("step 7" in found.message) == ("step 7" in str(raw))


def test_a_survived_out_of_memory_hides_no_cause_on_another_replica():
    loss = running().end(0, 75, reason=OOM).end(1, 1).loss
    assert (loss["replica"], loss["class"]) == (1, "User")


#: The kubelet's sentences end with a blank.
EMPTY_DIR = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". '
POD = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
CONTAINER = 'Container trainer exceeded its local ephemeral storage limit "1Gi". '
STORAGE = ("User", "StorageLimitExceeded")
EVICTED = ("Disruption", "Evicted")


@pytest.mark.fault("N17")
@pytest.mark.parametrize("code", [0, 1, 75, 137, 143])
@pytest.mark.parametrize(
    ("message", "judgement"),
    [(EMPTY_DIR, STORAGE), (POD, STORAGE), (CONTAINER, STORAGE), (LOW, EVICTED),
     ("The node had condition: [DiskPressure]. ", EVICTED), ("", EVICTED)],
)  # fmt: skip
def test_a_pod_that_outgrows_its_own_limit_is_its_programs_doing(code, message, judgement):
    """Whatever the container says: one that ends with 0 when it is told to is not done."""
    raw = pod(ended(code, "Completed" if code == 0 else "Error"), reason="Evicted", message=message)
    assert judged(raw) == judgement
    disrupted = {**raw, "status": raw["status"] | {"conditions": [PRESSURE]}}
    assert judged(disrupted) == EVICTED
    deleted = {**raw, "metadata": raw["metadata"] | DELETED}
    assert judged(deleted) == EVICTED


PROBE = {"exec": {"command": ["cat", "/tmp/alive"]}}
PROBED = {"livenessProbe": PROBE}
FAILED = ("User", "ProbeFailed")
ASKED = ("Collateral", "SIGTERM")


@pytest.mark.fault("N18")
@pytest.mark.parametrize(
    ("raw", "judgement"),
    [
        (pod(ended(143), trainer=PROBED), FAILED),
        (pod(ended(143), trainer={"startupProbe": PROBE}), FAILED),
        (pod(ended(143), trainer=PROBED, phase="Running"), FAILED),  # a sidecar is still at work
        (pod(ended(143, message=SIGTERM), trainer=PROBED), FAILED),
        (pod(ended(137, message=SIGTERM), trainer=PROBED), FAILED),  # after its grace period
        (pod(ended(0, "Completed", SIGTERM), trainer=PROBED), FAILED),  # behind a pipe
        (pod(ended(143, OOM), trainer=PROBED), FAILED),  # one that was survived before
        # Somebody asked for it, or something else shows.
        (pod(ended(143), trainer=PROBED, meta=DELETED), ("Disruption", "PodDeleted")),
        (pod(ended(143), trainer=PROBED, disrupted=EVICTION),
         ("Disruption", "EvictionByEvictionAPI")),
        (pod(ended(143), trainer=PROBED, reason="Evicted", message=EMPTY_DIR), STORAGE),
        (pod(ended(143), trainer=PROBED, reason="NodeShutdown"), ("Disruption", "NodeShutdown")),
        (pod(ended(143), trainer=PROBED, reason="Terminated"), ("Collateral", "Terminated")),
        (pod(ended(143, "Unknown"), trainer=PROBED), ("Infrastructure", "Unknown")),
        (init_failed(143, trainer=PROBED), ("Collateral", "InitContainerFailed")),
        # No SIGTERM, or none that the launcher got.
        (pod(ended(137), trainer=PROBED), ("Killed", "SIGKILL")),
        (pod(ended(1), trainer=PROBED), ("User", "ExitCode1")),
        (pod(ended(137, message=KILLED), trainer=PROBED), ("Killed", "SIGKILL")),
        (pod(ended(75, message=report("peerLost", 75)), trainer=PROBED),
         ("Collateral", "ExitCode75")),
        # No probe that ends a container.
        (pod(ended(143)), ASKED),
        (pod(ended(143), trainer={"readinessProbe": PROBE}), ASKED),
    ],
)  # fmt: skip
def test_a_sigterm_that_nobody_sent_is_charged_to_the_templates_probe(raw, judgement):
    assert judged(raw) == judgement


@pytest.mark.fault("N18")
@pytest.mark.parametrize("peer", [75, 143, 1])
def test_a_failed_probe_is_charged_and_its_guess_is_explained(peer):
    probed = {"spec": {"containers": [{"name": "trainer", "image": "trainer:1", **PROBED}]}}
    world = running(template=probed).end(2, 143, message=SIGTERM).wait(1)
    assert world.counts == (0, 0, 0), "who was gone first may show by now"
    world.end(1, peer).wait(4)
    assert world.counts == (1, 1, 0)
    loss = world.loss
    assert (loss["class"], loss["reason"]) == FAILED
    assert loss["replica"] == 2, "peers are not the cause"
    assert loss["exception"] in loss["message"]
    for words in ("SIGTERM", "nobody deleted", "liveness or startup", "is the likely cause"):
        assert words in loss["exception"]
    assert f"kubectl describe pod {loss['pod']}`" in loss["message"]


def test_a_pod_that_is_deleted_explains_the_sigterm_of_its_peers():
    probed = {"spec": {"containers": [{"name": "trainer", "image": "trainer:1", **PROBED}]}}
    world = running(template=probed)
    world.pods["job-1"]["metadata"] |= DELETED
    assert world.end(0, 143).loss["class"] == "Disruption"
    world = running(template=probed).end(0, 143, settle=False).end(1, 143, settle=False)
    world.pods["job-1"]["status"] |= {"phase": "Failed", "reason": "NodeShutdown"}
    assert world.settle().wait(7).loss["class"] == "Disruption"


def test_a_guess_is_no_exception_that_comes_again():
    probed = {"spec": {"containers": [{"name": "trainer", "image": "trainer:1", **PROBED}]}}
    world = running(template=probed, restart={"maxRestarts": 9})
    for _ in range(3):
        world.end(1, 143, message=report("sigterm", 143, step=7)).wait(6).wait(300).run()
    assert (world.phase, world.status["restarts"]["charged"]) == ("Running", 3)


@pytest.mark.parametrize("words", ["\n".join(f"step {n}" for n in range(500)), "x" * 4096, "one"])
@pytest.mark.parametrize("told", [False, True])
def test_the_kubelets_sentence_comes_before_the_end_of_the_log(words, told):
    log = [line[:200] for line in words.splitlines()[-20:]]
    last_words = report("exception", 1, exception="OSError: full", log=log) if told else words
    raw = pod(ended(1, message=last_words), reason="Evicted", message=CONTAINER)
    found = failure(raw)
    first, *rest = found.message.splitlines()
    assert first == CONTAINER.strip()
    assert rest[:1] == ["OSError: full"] if told else rest
    assert rest[-1][-3:] == words[-3:]
    assert len(found.message) <= observe.MESSAGE_MAX


def test_outgrown_limits_are_charged_and_meet_the_rules_for_evictions():
    def outgrow(world: World) -> World:
        world.run().end(0, 143, settle=False)
        world.pods["job-0"]["status"] |= {"phase": "Failed", "reason": "Evicted", "message": POD}
        return world.settle()

    world = outgrow(running(restart={"maxRestarts": 1}))
    assert world.counts[1] == 1
    assert outgrow(world.wait(10)).phase == "Failed"
    assert world.loss["message"].startswith(POD.strip())
    rules = [{"reasons": ["Evicted"], "action": "RestartFree"}]
    assert outgrow(running(restart={"maxRestarts": 0, "rules": rules})).counts == (1, 0, 1)


LOST = "job-0.job.ns.svc does not resolve (Name or service not known): is the job's Service there?"


@pytest.mark.parametrize(
    ("code", "kind", "judgement"),
    [(1, "exception", ("Infrastructure", "NamesNotResolved")),
     (76, "hang", ("Infrastructure", "NamesNotResolved")),
     (64, "exception", ("Permanent", "ExitCode64"))],
)  # fmt: skip
def test_a_name_that_does_not_resolve_is_the_clusters_doing(code, kind, judgement):
    words = f"{LOST}; torch.distributed.DistNetworkError: The client socket has timed out"
    raw = pod(ended(code, message=report(kind, code, exception=words)))
    assert judged(raw) == judgement
    assert failure(raw).exception.startswith("job-0.job.ns.svc does not resolve")


RUNC = ("failed to create containerd task: failed to create shim task: OCI runtime create failed: "
        "runc create failed: unable to start container process: {}: unknown")  # fmt: skip
INIT = "error during container init: "


def test_a_runtimes_words_are_shown_without_the_layers_around_them():
    words = RUNC.format(INIT + 'exec: "no-such-program": executable file not found in $PATH')
    loss = failure(pod(ended(128, "StartError", words)))
    assert loss.exception.startswith('exec: "no-such-program": executable file not found in $PATH')
    assert loss.message == words


#: As runc and NVIDIA's hook write it; of older ones, too.
HOOKS = [
    (
        "error running prestart hook #0: exit status 1, stdout: , stderr: Auto-detected mode as "
        "'legacy'\nnvidia-container-cli: initialization error: nvml error: driver not loaded"
    ),
    (
        "error running hook #0: error running hook: exit status 1, stdout: , stderr: nvidia-"
        "container-cli: mount error: stat failed: /dev/nvidia-uvm: no such file or directory"
    ),
    (
        'error running createContainer hook #1: fork/exec /usr/bin/nvidia-ctk: exec: "nvidia-ctk": '
        "executable file not found in $PATH"
    ),
    "failed to inject CDI devices: unresolvable CDI devices nvidia.com/gpu=0",
]
HARDWARE = ("Hardware", "StartError")
PERMANENT = ("Permanent", "StartError")
ANOTHER_NODE = ("Infrastructure", "StartError")


@pytest.mark.fault("N19")
@pytest.mark.parametrize(
    ("words", "judgement"),
    [
        *[(words, HARDWARE) for words in HOOKS],
        (INIT + 'exec: "pyhton": executable file not found in $PATH', PERMANENT),
        (INIT + 'exec: "/nope": stat /nope: no such file or directory', PERMANENT),
        (INIT + 'exec: "/workspace/run.sh": permission denied', PERMANENT),
        (INIT + 'exec: "/workspace": is a directory', PERMANENT),
        (INIT + 'exec: "/etc/passwd/x": stat /etc/passwd/x: not a directory', PERMANENT),
        (INIT + 'mkdir /etc/passwd: not a directory', PERMANENT),
        (INIT + 'chdir to cwd ("/root") set in config.json failed: permission denied', PERMANENT),
        ("container init was OOM-killed (memory limit too low?)", ("OOM", "StartError")),
        (
            "unable to set memory limit to 1 (current usage: 2469888, peak usage: 2785280)",
            ("OOM", "StartError"),
        ),
        (INIT + 'error mounting "/var/lib/kubelet/pods/1/volumes/data" to rootfs at "/data": stat '
         "/var/lib/kubelet/pods/1/volumes/data: no such file or directory", ANOTHER_NODE),
        (("unable to apply cgroup configuration: mkdir /sys/fs/cgroup/kubepods/pod1: permission "
         "denied"), ANOTHER_NODE),
        (INIT + "write /proc/self/attr/keycreate: invalid argument", ANOTHER_NODE),
        ("can't get final child's PID from pipe: EOF", ANOTHER_NODE),
        ("", ANOTHER_NODE),
    ],
)  # fmt: skip
def test_a_failed_start_is_final_only_if_no_other_node_would_help(words, judgement):
    assert judged(pod(ended(128, "StartError", RUNC.format(words)))) == judgement
    assert judged(init_failed(128, "StartError", RUNC.format(words))) == judgement


def test_a_node_that_starts_no_container_is_avoided_and_not_for_ever_free():
    def refuse(world: World) -> World:
        world.run().end(1, 128, reason="StartError", message=RUNC.format("EOF"))
        return world.wait(20)

    world = running(restart={"maxRestarts": 0})
    for _ in range(3):
        refuse(world)
    assert (world.status["avoidedNodes"], world.counts) == (["node2"], (3, 0, 3))
    assert refuse(world).phase == "Failed"


def test_a_failed_sidecar_or_survived_out_of_memory_undoes_no_success():
    assert evidence.succeeded(observe.pod(pod(ended(0, "Completed"))))
    assert evidence.succeeded(observe.pod(pod(ended(0, OOM), phase="Succeeded")))


def test_who_is_killed_did_not_die_of_an_earlier_exception_in_its_log():
    """The kubelet gives the log's end where nobody was left to write last words."""
    log = "Traceback (most recent call last):\nKeyError: 'weight_decay'\n[launcher] round 3"
    found = evidence.failure(observe.pod(pod(ended(137, message=log))), 1, START)
    assert found.exception == ""
    assert "weight_decay" not in failure_text.describe(found)
    found = evidence.failure(observe.pod(pod(ended(1, message=log))), 1, START)
    assert found.exception == "KeyError: 'weight_decay'"
