"""A queue of Kueue, on its real definitions of v0.17: the test writes what Kueue would write.

What Kueue itself does with it is the business of tests/cluster/test_queue.py.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from devcluster import binaries
from support import arena as support
from support import policy, workloads
from support.arena import Arena
from support.chart import operator_rules
from support.cluster import Cluster
from support.proxy import Fault
from support.rest import Object, RestError, eventually
from support.sharing import Shared

GROUP = "/apis/kueue.x-k8s.io/v1beta2"
KINDS = ("workloads", "resourceflavors", "workloadpriorityclasses")


@pytest.fixture(scope="module")
def definitions(control_plane: Cluster, shared: Shared) -> None:
    """Kueue's own, once for all tests of a run."""

    def apply() -> bool:
        folder = binaries.module_directory("kueue") / "config/components/crd/bases"
        files = [f"--filename={folder / f'kueue.x-k8s.io_{kind}.yaml'}" for kind in KINDS]
        control_plane.kubectl("apply", "--server-side", *files, check=True)
        every = ",".join(f"{kind}.kueue.x-k8s.io" for kind in KINDS)
        served = lambda: control_plane.kubectl("get", every).returncode == 0  # noqa: E731
        eventually("the API server serves them", served)
        return True

    shared.once("kueue", apply)


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return operator_rules("--set", "kueue.enabled=true")


@pytest.fixture(scope="module")
def stage(
    control_plane: Cluster,
    definitions: None,
    rules: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Arena]:
    """An operator that looks at queues, with the chart's rights."""
    with support.arena(control_plane.kubeconfig, tmp_path_factory.mktemp("queue")) as found:
        found.rights().give(rules)
        policy.bind(control_plane, found.namespace, "operator")
        found.start_operator("--kueue", "true")
        yield found


class Queue:
    """Kueue's part for one job of a stage."""

    def __init__(self, stage: Arena, gang: str, **spec: Any) -> None:
        self.stage, self.gang = stage, gang
        job = stage.job(gang, **spec)
        job["metadata"]["labels"] = {workloads.QUEUE: "team"}
        stage.rest.post(stage.job_path(), job)

    @property
    def _all(self) -> str:
        return self.stage.path("workloads", group=GROUP)

    def seen(self) -> Object | None:
        """The job's Workload."""
        for one in self.stage.rest.items(self._all):
            if any(owner["name"] == self.gang for owner in one["metadata"]["ownerReferences"]):
                return one
        return None

    def wait(self, what: str, check: Callable[[Object], object]) -> Object:
        def found() -> Object | None:
            one = self.seen()
            return one if one is not None and check(one) else None

        return eventually(f"the Workload of {self.gang}: {what}", found)

    def play(self, what: Callable[..., Object], *args: Any) -> None:
        """Write it as Kueue would; again if the operator was faster."""

        def written() -> bool:
            one = self.wait("is there", lambda _: True)
            body = what(one, datetime.now(UTC), *args)
            path = f"{self._all}/{one['metadata']['name']}/status"
            try:
                self.stage.rest.call("PUT", path, body)
            except RestError as error:
                if error.code != 409:
                    raise
                return False
            return True

        eventually("Kueue's write", written)

    def label(self, **labels: str | None) -> None:
        named = {f"kueue.x-k8s.io/{name.replace('_', '-')}": one for name, one in labels.items()}
        body = {"metadata": {"labels": named}}
        self.stage.rest.merge(self.stage.job_path(self.gang), body)

    def words(self, part: str, reason: str = "Queued") -> None:
        """Wait until the job says so."""
        self.stage.wait_condition(self.gang, "Stalled", reason)
        said = lambda: part in self.stage.condition(self.gang, "Stalled")["message"]  # noqa: E731
        eventually(f"{self.gang} says {part}", said)

    def pods(self) -> list[Object]:
        return self.stage.kubelet.pods(self.gang)


@pytest.fixture
def flavor(stage: Arena) -> Iterator[str]:
    name = f"flavor-{stage.namespace}"
    toleration = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
    spec = {"nodeLabels": {"gpu": "a100"}, "tolerations": [toleration]}
    body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor",
            "metadata": {"name": name}, "spec": spec}  # fmt: skip
    stage.rest.post(f"{GROUP}/resourceflavors", body)
    yield name
    stage.rest.delete(f"{GROUP}/resourceflavors/{name}")


def test_no_pod_before_the_admission_and_the_end_is_told_to_kueue(stage, gang, flavor):
    queue = Queue(stage, gang)
    queue.play(workloads.pending, "couldn't assign flavors to pod set trainer: insufficient quota")
    queue.words("insufficient quota")
    assert queue.pods() == []
    assert stage.status(gang)["phase"] == "Pending"
    queue.play(workloads.admit, flavor)
    stage.wait_phase(gang, "Running", attempt=1)
    for pod in queue.pods():
        assert pod["spec"]["nodeSelector"] == {"gpu": "a100"}
        assert "spot" in [one.get("key") for one in pod["spec"]["tolerations"]]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "trainer"
    ready = lambda one: workloads.condition(one, "PodsReady").get("reason") == "Started"  # noqa: E731
    queue.wait("PodsReady", ready)
    stage.succeed(gang)
    queue.wait("Finished", lambda one: workloads.condition(one, "Finished").get("reason"))
    assert stage.quiet_resyncs() == []


def test_a_pods_field_that_kueue_does_not_know_keeps_no_job_out(stage, gang, flavor):
    """Kueue 0.17 has the pods of Kubernetes 1.35."""
    template = stage.job(gang)["spec"]["template"]
    template["spec"] |= {"schedulingGroup": {"podGroupName": "another"}, "schedulerName": "hand"}
    queue = Queue(stage, gang, template=template)
    queue.play(workloads.admit, flavor)
    stage.wait_phase(gang, "Running")


def test_labels_are_followed_as_far_as_kueues_definitions_allow(stage, gang, flavor):
    """The name of a priority class is looked up, and a queue stays while quota is held."""
    cls = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "value": 7,
           "metadata": {"name": gang}}  # fmt: skip
    stage.rest.post(f"{GROUP}/workloadpriorityclasses", cls)
    queue = Queue(stage, gang)
    queue.wait("is there", lambda one: one["spec"]["queueName"] == "team")
    queue.label(queue_name="other", priority_class=gang)
    found = queue.wait("follows", lambda one: one["spec"]["queueName"] == "other")
    found = queue.wait("follows", lambda one: one["spec"].get("priority") == 7)
    assert found["spec"]["priorityClassRef"]["kind"] == "WorkloadPriorityClass"
    queue.play(workloads.admit, flavor)
    stage.wait_phase(gang, "Running")
    queue.label(queue_name="third")
    stage.quiet_resyncs()
    held = queue.seen()
    assert held
    assert held["spec"]["queueName"] == "other"
    assert stage.status(gang)["phase"] == "Running"
    stage.rest.delete(f"{GROUP}/workloadpriorityclasses/{gang}")


@pytest.mark.fault("U20")
def test_without_kueue_a_job_waits_until_it_is_installed(arena, definitions):
    absent = Fault("answer", lambda call: "kueue.x-k8s.io" in call.path, times=10_000, code=404)
    arena.proxy.faults = [absent]
    arena.start_operator("--kueue", "true")
    queue = Queue(arena, "gang")
    queue.words("install Kueue", "QueueUnavailable")
    plain = arena.apply("plain")["metadata"]["name"]
    arena.wait_phase(plain, "Running")
    arena.proxy.faults = []
    queue.wait("is there", lambda _: True)


@pytest.mark.fault("U20")
def test_without_the_right_a_job_waits_and_a_gang_that_runs_goes_on(arena, definitions, rules):
    rights = arena.rights()
    rights.give(rules)
    operator = arena.start_operator("--kueue", "true")
    queue = Queue(arena, "gang")
    arena.rest.post(
        f"{GROUP}/resourceflavors",
        {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "spec": {},
         "metadata": {"name": arena.namespace}},
    )  # fmt: skip
    queue.play(workloads.admit, arena.namespace)
    arena.wait_phase("gang", "Running")
    rights.give([rule for rule in rules if "kueue.x-k8s.io" not in rule["apiGroups"]])
    operator.kill()
    operator.wait()
    operator.start()
    operator.wait_ready()
    operator.wait_leading()
    other = Queue(arena, "other")
    other.words("install Kueue", "QueueUnavailable")
    arena.kubelet.finish("gang-1", 1)
    queue.words("install Kueue", "QueueUnavailable")
    assert other.seen() is None
    assert queue.pods() == []
    rights.give(rules)
    arena.wait_phase("gang", "Running")
    other.wait("is there", lambda _: True)
    arena.rest.delete(f"{GROUP}/resourceflavors/{arena.namespace}")
