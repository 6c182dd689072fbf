"""The executor: what each answer of the API server teaches. The API is a scripted double."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from ddpjob_contract.crd import LABEL_ATTEMPT
from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects.observe import Job
from ddpjob_operator.shell.api import (
    ApiError,
    Conflict,
    Forbidden,
    Listing,
    NotFound,
    Object,
    Resource,
    error_from_status,
)
from ddpjob_operator.shell.executor import Executor, JobGoneError, NotLeadingError
from ddpjob_operator.shell.store import Store
from ddpjob_operator.shell.telemetry import Metrics
from support import stored
from support.stored import job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Answer = Object | ApiError


class ScriptedApi:
    """Answers with what the test put into ``script`` under "verb plural", in turn."""

    def __init__(self) -> None:
        self.script: dict[str, list[Any]] = {}
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.slow: set[str] = set()
        self.versions: list[str] = []  # preconditions of deletions

    def _answer(self, verb: str, resource: Resource, body: Any = None) -> Any:
        what = f"{verb} {resource.plural}"
        self.calls.append(what)
        self.bodies.append(body)
        answer = self.script[what].pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def get(self, resource: Resource, *_: object) -> Any:
        return self._answer("get", resource)

    async def create(self, resource: Resource, _: str, body: Any, *, strict: bool = False) -> Any:
        assert strict
        return self._answer("create", resource, body)

    async def replace(self, resource: Resource, *found: Any, sub: str = "") -> Any:
        return self._answer("replace", resource, found[-1])

    async def delete(self, resource: Resource, _: str, name: str, **how: Any) -> Any:
        if name in self.slow:
            await asyncio.sleep(0.05)
        self.versions.append(how.get("version", ""))
        return self._answer("delete", resource, (name, how["uid"], how.get("grace")))

    async def list_all(
        self,
        resource: Resource,
        namespace: str,
        selector: str = "",
        *,
        keep: Callable[[Any], Any] = dict,
    ) -> Any:
        listing = self._answer("list", resource, selector)
        return Listing(list(map(keep, listing.items)), listing.resource_version)


class FakeRecorder:
    def __init__(self) -> None:
        self.sent: list[act.Event] = []

    def send(self, job: Job, events: Any) -> None:
        self.sent += events


class Stage:
    def __init__(self) -> None:
        self.api, self.store, self.recorder = ScriptedApi(), Store(), FakeRecorder()
        self.metrics = Metrics()
        self.leading = True
        self.executor = Executor(
            self.api,  # type: ignore[arg-type]
            self.store,
            self.recorder,  # type: ignore[arg-type]
            self.metrics,
            leads=lambda: self.leading,
            now=lambda: NOW,
        )
        self.store.put_job(job(5))
        self.job = self.now

    async def do(self, *actions: act.Action) -> None:
        await self.executor.carry_out(self.job, actions)

    @property
    def feedback(self) -> act.ApiFeedback:
        return self.store.feedback("u1")

    @property
    def now(self) -> Job:
        """The job as it is known by now."""
        snapshot = self.store.snapshot(("ns", "job"))
        return snapshot.job

    def counted(self) -> float:
        """Restarts for the class User, as the metrics have them."""
        labels = {"namespace": "ns", "class": "User"}
        return self.metrics.registry.get_sample_value("ddpjob_restarts_total", labels) or 0

    @property
    def pods(self) -> list[str]:
        return [pod.uid for pod in self.store.pods_of("u1")]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def pod(replica: int = 0, attempt: int = 2, **more: Any) -> Object:
    return stored.pod(f"p{replica}-{attempt}", replica, attempt, **more)


def create(replica: int = 0) -> act.CreatePod:
    return act.CreatePod(replica, 2, {"metadata": {"name": f"job-{replica}"}})


def taken() -> ApiError:
    return Conflict(409, "AlreadyExists", "is there")


WRITE = act.WriteStatus(
    {"phase": "Starting"},
    (act.Event("Normal", "Started", "x"),),
    (act.Measurement("restarts_total", 1, "User"), act.Measurement("rounds_total", 2, "Hang")),
)
LOST = ApiError(504, "", "lost")


async def test_a_stored_status_is_known_at_once_and_only_then_told(stage):
    stage.api.script["replace ddpjobs"] = [job(9, phase="Starting")]
    await stage.do(WRITE)
    assert (stage.now.resource_version, stage.now.status) == ("9", {"phase": "Starting"})
    assert stage.feedback.status_written_at == NOW
    assert [event.reason for event in stage.recorder.sent] == ["Started"]
    assert stage.counted() == 1
    (body,) = stage.api.bodies
    assert body["metadata"]["resourceVersion"] == "5"


@pytest.mark.parametrize("answer", ["stored", "repeated"])
async def test_what_was_read_before_another_operator_acted_confirms_nothing(stage, answer):
    """Also where aiohttp has repeated the write, and only the first one counts."""
    stage.store.set_feedback("u1", act.ApiFeedback(confirmed=act.QuorumRead(2, NOW)))
    stage.api.script = {"replace ddpjobs": [job(9, phase="Running")]}
    if answer == "repeated":
        stage.api.script["replace ddpjobs"] = [Conflict(409, "Conflict", "changed")]
        stage.api.script["get ddpjobs"] = [job(9, phase="Running")]
    await stage.do(act.WriteStatus({"phase": "Running"}, takes_over=True))
    assert stage.now.resource_version == "9"
    assert stage.feedback.confirmed is None


@pytest.mark.parametrize(
    ("answer", "found", "told"),
    [
        # The answer to the first try was lost, and aiohttp made a second one by itself.
        (Conflict(409, "Conflict", "changed"), "Starting", ["Started"]),
        (LOST, "Starting", ["Started"]),
        (LOST, "Pending", []),
        (ApiError(0, "", "lost"), "", []),
    ],
)
async def test_a_status_write_of_unknown_fate_reads_the_job_again(stage, answer, found, told):
    """If only the answer was lost, its events and figures are those of any other write.

    Nothing is confirmed any more, also if the read fails, too.
    """
    stage.store.set_feedback("u1", act.ApiFeedback(confirmed=act.QuorumRead(2, NOW)))
    stage.api.script["replace ddpjobs"] = [answer]
    stage.api.script["get ddpjobs"] = [job(9, phase=found) if found else LOST]
    with contextlib.nullcontext() if answer.code == 409 else pytest.raises(ApiError):
        await stage.do(WRITE, create())
    assert stage.now.resource_version == ("9" if found else "5")
    assert (stage.feedback.confirmed is None) == (answer.code != 409)
    assert [event.reason for event in stage.recorder.sent] == told
    assert stage.counted() == len(told)
    assert stage.api.calls == ["replace ddpjobs", "get ddpjobs"], "the rest is planned anew"


async def test_nothing_is_done_without_the_lease(stage):
    stage.leading = False
    for action in (WRITE, act.ConfirmGone(2), create(), act.DeletePod("job-0", "p", None)):
        with pytest.raises(NotLeadingError):
            await stage.do(action)
    assert stage.api.calls == []


@pytest.mark.parametrize(
    ("found", "owner", "attempt", "deleting", "kept"),
    [
        (pod(attempt=1), "u1", 1, False, ["p0-1"]),
        (pod(deletionTimestamp="2026-01-01T00:00:00Z"), "u1", 2, True, ["p0-2"]),
        (pod(owner="other"), "other", 2, False, []),
        (pod(ownerReferences=[]), None, 2, False, []),
        (pod(attempt=2, uid="hidden"), "u1", 2, False, []),
    ],
    ids=["older-attempt", "terminating", "another-job", "nobody's", "lost-its-label"],
)
async def test_a_name_that_is_taken_is_a_refusal_that_tells_by_whom(
    stage, found, owner, attempt, deleting, kept
):
    stage.store.remove_pod("hidden")  # the watch said DELETED, but the pod runs on
    stage.api.script = {"create pods": [taken()], "get pods": [found]}
    await stage.do(create())
    refusal = stage.feedback.refusals[0]
    existing = refusal.existing
    assert (existing.owner_uid, existing.attempt, existing.deleting) == (owner, attempt, deleting)
    assert existing.uid == found["metadata"]["uid"]
    assert (refusal.code, refusal.attempt, refusal.at) == (409, 2, NOW)
    assert stage.pods == kept, "ours is known, so that the planner can remove it"


@pytest.mark.parametrize(
    ("code", "confirmed"), [(403, True), (422, True), (500, False), (0, False)]
)
async def test_after_a_creation_of_unknown_fate_a_list_comes_first(stage, code, confirmed):
    read = act.QuorumRead(2, NOW)
    stage.store.set_feedback("u1", act.ApiFeedback(confirmed=read))
    stage.api.script["create pods"] = [error_from_status(code, {"reason": "R", "message": "m"})]
    await stage.do(create())
    assert stage.feedback.confirmed == (read if confirmed else None)
    refusal = stage.feedback.refusals[0]
    assert (refusal.code, refusal.reason, refusal.message) == (code, "R", "m")


@pytest.mark.parametrize(
    "late",
    [
        pod(0, attempt=1),
        pod(0, attempt=1, labels={}),
        pod(0, deletionTimestamp="x"),
        pod(owner="other"),
    ],
    ids=["of-an-older-attempt", "without-its-labels", "leaving", "another-job's"],
)
@pytest.mark.fault("A4")
async def test_where_a_name_is_taken_no_more_creations_begin(stage, late):
    """As when a call that timed out arrives after the barrier: what is planned is out of date."""
    pods = [pod(replica, version=20 + replica) for replica in range(1, 64)]
    stage.api.script["create pods"] = [*pods[:40], taken(), *pods[40:]]
    asked = asyncio.Event()

    async def slowly(*_: object) -> Object:
        asked.set()
        await asyncio.sleep(0)  # others would begin meanwhile
        return late

    stage.api.get = slowly  # type: ignore[method-assign]
    await stage.do(*(create(replica) for replica in (*range(1, 41), 0, *range(41, 64))))
    assert asked.is_set()
    assert stage.api.calls.count("create pods") == 41
    assert set(stage.feedback.refusals) == {0}


async def test_the_barrier_shows_an_older_pod_or_confirms(stage):
    stage.api.script["list pods"] = [
        Listing([pod(0, attempt=1, version=7)], "20"),
        Listing([pod(1, attempt=2, version=21)], "30"),
    ]
    stage.api.script["get ddpjobs"] = [job(6, attempt=2, phase="Running")] * 2
    await stage.do(act.ConfirmGone(2), create())
    assert stage.feedback.confirmed == act.QuorumRead(2, NOW, alone=False)
    assert stage.pods == ["p0-1"]
    assert stage.api.calls == ["list pods", "get ddpjobs"], "the rest of the plan is dropped"
    await stage.do(act.ConfirmGone(2))
    assert stage.feedback.confirmed == act.QuorumRead(2, NOW, replicas=frozenset({1}))
    assert stage.pods == ["p1-2"], "what the list does not show is gone"


async def test_who_stored_that_a_start_begins_knows_it_until_an_answer_is_lost(stage):
    def begun() -> bool:
        return stage.feedback.confirmed is not None and stage.feedback.confirmed.begun

    found = job(9, phase="Starting", attempt=2)
    stage.store.set_feedback("u1", act.ApiFeedback(confirmed=act.QuorumRead(2, NOW)))
    stage.api.script = {
        "replace ddpjobs": [found, found],
        "list pods": [Listing([], "20")] * 2,
        "get ddpjobs": [found] * 2,
        "create pods": [LOST],
    }
    await stage.do(act.WriteStatus(found["status"]))
    assert not begun(), "it only reports"
    await stage.do(act.WriteStatus(found["status"], begins=True), act.ConfirmGone(2))
    assert begun(), "a later read changes nothing of that"
    await stage.do(create())
    await stage.do(act.ConfirmGone(2))
    assert stage.feedback.confirmed == act.QuorumRead(2, NOW)


async def test_the_barrier_tells_who_had_been_there_before_it_looked(stage):
    for replica in (0, 1):
        stage.store.put_pod(pod(replica))
    stage.store.remove_pod("p0-2")
    stage.api.script["list pods"] = [Listing([pod(1), pod(2, version=15)], "20")]
    stage.api.script["get ddpjobs"] = [job(6, attempt=2, phase="Running")]
    stage.store.put_job(job(6, attempt=2, phase="Running"))
    await stage.executor.carry_out(stage.now, [act.ConfirmGone(2)])
    assert stage.feedback.confirmed == act.QuorumRead(
        2, NOW, running=True, seen=frozenset({0, 1}), replicas=frozenset({1, 2})
    )


async def test_nothing_is_confirmed_for_a_job_that_has_gone_on_meanwhile(stage):
    """A leader that was deposed without knowing it still has the old status in its cache."""
    stage.api.script["list pods"] = [Listing([], "20")] * 2
    stage.api.script["get ddpjobs"] = [job(6, attempt=3), NotFound(404, "", "")]
    await stage.do(act.ConfirmGone(2), create())
    assert stage.api.calls == ["list pods", "get ddpjobs"]
    assert stage.feedback.confirmed is None
    assert stage.now.status == {"attempt": 3}
    with pytest.raises(JobGoneError):
        await stage.do(act.ConfirmGone(3))


def with_pod(stage: Stage) -> act.DeletePod:
    stage.store.put_pod(pod())
    return act.DeletePod("job-0", "p0-2", 2)


LEAVING = {"version": 11, "deletionTimestamp": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("answer", "found", "left"),
    [
        (NotFound(404, "NotFound", ""), None, []),
        ({"kind": "Status", "status": "Success"}, None, []),
        (pod(**LEAVING), None, []),
        (pod(**LEAVING, deletionGracePeriodSeconds=2), None, ["p0-2"]),
        (pod(**LEAVING, deletionGracePeriodSeconds=0, finalizers=["x"]), None, ["p0-2"]),
        (taken(), pod(attempt=3), []),
        (taken(), pod(), ["p0-2"]),  # a mere write: it is tried again
    ],
    ids=["gone", "status", "removed-at-once", "graceful", "finalizer", "another-uid", "written"],
)
async def test_deletions(stage, answer, found, left):
    stage.api.script = {"delete pods": [answer], "get pods": [found]}
    again = found == pod()
    with pytest.raises(Conflict) if again else contextlib.nullcontext():
        await stage.do(with_pod(stage))
    assert stage.api.bodies[0] == ("job-0", "p0-2", 2)
    assert stage.pods == left
    assert all(pod.deleting != again for pod in stage.store.pods_of("u1"))


async def test_a_job_that_somebodys_finalizer_keeps_is_deleted_once(stage):
    leaving = {"kind": "DDPJob", **job(9)}
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stage.api.script["delete ddpjobs"] = [leaving, {"kind": "Status", "status": "Success"}]
    await stage.do(act.DeleteJob("u1"))
    assert stage.now.deleting, "the planner leaves it alone from now on"
    with pytest.raises(JobGoneError):
        await stage.do(act.DeleteJob("u1"))


async def test_a_job_that_has_changed_since_it_was_finished_is_not_deleted(stage):
    """As after a restore of etcd, which makes it a running one again."""
    stage.api.script["delete ddpjobs"] = [Conflict(409, "Conflict", "it has changed")]
    stage.api.script["get ddpjobs"] = [job(9)]
    await stage.do(act.DeleteJob("u1"))
    assert stage.api.versions == ["5"]
    assert stage.now.resource_version == "9"


def service(owner: str | None = "u1", **meta: Any) -> Object:
    owners = [{"controller": True, "uid": owner}] if owner else []
    labels = {"ours": "x", "theirs": "y"}
    meta = {"name": "job", "ownerReferences": owners, "labels": labels, **meta}
    spec = {
        "ports": [{"port": 1, "protocol": "TCP"}],
        "clusterIP": "None",
        "sessionAffinity": "None",
    }
    return {"kind": "Service", "metadata": meta, "spec": spec}


def missing() -> ApiError:
    return NotFound(404, "NotFound", "")


SERVICE = {
    "kind": "Service",
    "metadata": {"name": "job", "labels": {"ours": "x"}},
    "spec": {"clusterIP": "None", "ports": [{"port": 1}]},
}
ENSURE = act.EnsureNetwork(2, (SERVICE,))


def changed(**spec: Any) -> Object:
    found = service(labels={"ours": "other", "theirs": "y"}, resourceVersion="7")
    return {**found, "spec": {**found["spec"], **spec}}


NO_UPDATE = Forbidden(403, "Forbidden", "no update")


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ({}, {}),
        ({"ports": []}, {}),
        ({"ports": [{"port": 2, "protocol": "TCP"}]}, {}),
        ({}, NO_UPDATE),  # it holds up nothing
    ],
    ids=str,
)
async def test_what_somebody_has_changed_of_it_is_put_right_by_one_write(stage, spec, answer):
    stage.api.script = {"get services": [changed(**spec)], "replace services": [answer]}
    await stage.do(ENSURE)
    assert stage.api.calls == ["get services", "replace services"]
    body = stage.api.bodies[1]
    assert body["metadata"]["labels"] == {"ours": "x", "theirs": "y"}
    assert body["metadata"]["resourceVersion"] == "7", "guarded"
    assert body["spec"]["sessionAffinity"] == "None", "the API server's own stays"
    assert [port["port"] for port in body["spec"]["ports"]] == [1]
    told = "NetworkNotRepaired" if answer is NO_UPDATE else "NetworkRepaired"
    assert [event.reason for event in stage.recorder.sent] == [told]
    assert stage.feedback.network_attempt == 2


@pytest.mark.parametrize(
    ("gets", "creates", "code", "owner"),
    [
        ([service("other")], [], 409, "other"),
        ([service(None)], [], 409, None),
        ([service(deletionTimestamp="x")], [], 409, "u1"),
        ([missing(), service("other")], [taken()], 409, "other"),
        ([missing()], [Forbidden(403, "Forbidden", "quota")], 403, None),
    ],
    ids=["foreign", "nobody's", "terminating", "foreign-after-all", "forbidden"],
)
async def test_network_that_is_refused_stops_the_plan(stage, gets, creates, code, owner):
    stage.api.script = {"get services": list(gets), "create services": list(creates)}
    await stage.do(ENSURE, create())
    assert stage.feedback.network_attempt == 0
    refusal = stage.feedback.network_refusal
    assert refusal.code == code
    assert (refusal.existing.owner_uid if refusal.existing else None) == owner
    assert "create pods" not in stage.api.calls


@pytest.mark.parametrize("there", [False, True])
async def test_the_secret_is_drawn_once_and_neither_read_nor_logged(stage, caplog, there):
    """One that is there is the job's, by its name: the operator has no right to look."""
    secret = {"kind": "Secret", "metadata": {"name": "job-12345678"}, "type": "Opaque"}
    stage.api.script = {"create secrets": [taken() if there else {}]}
    await stage.do(act.EnsureNetwork(2, (secret,)))
    assert stage.api.calls == ["create secrets"]
    drawn = stage.api.bodies[0]["stringData"]["token"]
    assert (len(bytes.fromhex(drawn)), stage.feedback.network_attempt) == (32, 2)
    assert drawn not in caplog.text


@pytest.mark.parametrize(
    "refused",
    [
        Forbidden(403, "Forbidden", "no secrets"),
        Conflict(409, "Conflict", "Operation cannot be fulfilled on resourcequotas"),
    ],
)
async def test_a_secret_that_is_refused_stops_the_plan(stage, refused):
    """A 409 is not always that it is there."""
    stage.api.script = {"create secrets": [refused]}
    await stage.do(act.EnsureNetwork(2, ({"kind": "Secret", "metadata": {}}, SERVICE)), create())
    assert stage.api.calls == ["create secrets"]
    refusal = stage.feedback.network_refusal
    assert (refusal.code, stage.feedback.network_attempt) == (refused.code, 0)


async def test_every_call_of_a_batch_ends_before_an_error_is_raised(stage):
    stage.store.put_pod(pod(0))
    stage.store.put_pod(pod(1))
    stage.api.slow = {"job-1"}
    stage.api.script["delete pods"] = [ApiError(500, "", "x"), missing()]
    with pytest.raises(ApiError):
        await stage.do(act.DeletePod("job-0", "p0-2", 2), act.DeletePod("job-1", "p1-2", 2))
    assert stage.pods == ["p0-2"]


@pytest.mark.parametrize("kind", ["pods", "services"])
async def test_a_row_of_refusals_is_one_line_in_the_log_and_ends_with_a_success(
    stage, kind, caplog
):
    action = ENSURE if kind == "services" else create()
    script = stage.api.script
    for serial in range(4):
        said = f'pods "job-0" is forbidden: request {serial}'
        script[f"create {kind}"] = [Forbidden(403, "Forbidden", said)]
        script[f"get {kind}"] = [NotFound(404, "NotFound", "no")]
        await stage.do(action)
    assert len(stage.feedback.refused) == 4
    assert len([r for r in caplog.records if "is forbidden" in r.getMessage()]) == 1
    script["create pods"] = [pod()]
    await stage.do(create())
    assert stage.feedback.refused == ()


async def test_pods_that_are_taken_widen_the_way_up_to_a_bound(stage):
    """Doubling: 1, 2, 4 ... 32 side by side. Each call takes one tick of a made-up clock."""
    under_way, widths = [0], []

    async def slowly(*_: object, **__: object) -> Object:
        under_way[0] += 1
        widths.append(under_way[0])
        await asyncio.sleep(0.01)
        under_way[0] -= 1
        return pod(len(widths), version=10 + len(widths))

    stage.api.create = slowly  # type: ignore[method-assign]
    await stage.do(*(create(replica) for replica in range(200)))
    assert len(widths) == 200
    assert widths[0] == 1
    assert max(widths) == 32
    assert under_way == [0]


GROUP = {
    "apiVersion": "scheduling.k8s.io/v1alpha2",
    "kind": "PodGroup",
    "metadata": {"name": "job-u1-2"},
    "spec": {},
}


@pytest.mark.parametrize("waits", [False, True])
async def test_a_right_to_groups_that_is_taken_away_ends_no_wait(stage, waits):
    """Its group is there: only a right to look is gone, as after an upgrade of the chart."""
    if waits:
        stage.store.put_pod(pod(), from_watch=False)
    forbidden = Forbidden(403, "Forbidden", "podgroups is forbidden")
    stage.api.script = {"get podgroups": [forbidden]}
    await stage.do(act.EnsureNetwork(2, (GROUP,)))
    assert (stage.feedback.no_gang is None) == waits
    assert (stage.feedback.network_refusal is not None) == waits


async def test_groups_that_no_api_can_read_hold_up_no_job(stage):
    """As those of v1alpha2 that an upgrade to Kubernetes 1.37 has left in etcd."""
    unread = 'no kind "PodGroup" is registered for version "scheduling.k8s.io/v1alpha2"'
    stage.api.script = {"list podgroups": [ApiError(429, "TooManyRequests", unread)]}
    await stage.do(act.RemoveGroups("job-u1-1", "v1beta1"))
    assert stage.feedback.groups_removed == "job-u1-1"


async def test_a_priority_class_that_is_missing_is_no_missing_api(stage):
    """Its words would be of feature gates and rights, and the cure is a class."""
    wrong = 'podgroups "job-u1-2" is forbidden: no PriorityClass with name high was found'
    refused = Forbidden(403, "Forbidden", wrong)
    stage.api.script = {"get podgroups": [missing()], "create podgroups": [refused]}
    await stage.do(act.EnsureNetwork(2, (GROUP,)))
    assert stage.feedback.no_gang is None
    assert stage.feedback.network_refusal.message == wrong


async def test_a_deposed_operators_late_removal_spares_a_newer_attempts_group(stage):
    """Without pods so far nothing protects it, and all pods would wait for a group in vain."""

    def group(attempt: int) -> Object:
        labels = {LABEL_ATTEMPT: str(attempt)}
        meta = {"name": f"job-u1-{attempt}", "uid": f"g{attempt}", "labels": labels}
        return {"metadata": meta | {"ownerReferences": [{"controller": True, "uid": "u1"}]}}

    found = Listing([group(1), group(2), group(3)], "9")
    stage.api.script = {"list podgroups": [found], "delete podgroups": [{}, {}, {}]}
    await stage.do(act.RemoveGroups("job-u1-2", "v1beta1"))
    gone = [body[1] for body in stage.api.bodies if isinstance(body, tuple)]
    assert gone == ["g1", "g2"]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_group_that_cannot_be_looked_for_delays_no_later_pod(stage, waits):
    """A backoff would outlast the wait: only a pod that is created ends it."""
    if waits:
        stage.store.put_pod(pod(), from_watch=False)
    stage.api.script = {"get podgroups": [ApiError(500, "InternalError", "etcd")]}
    await stage.do(act.EnsureNetwork(2, (GROUP,)))
    assert stage.feedback.network_refusal is not None
    assert (stage.feedback.refused == ()) == waits
