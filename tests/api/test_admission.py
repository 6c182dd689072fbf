"""What the API server says to good and bad DDPJobs, through `kubectl apply` as users run it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

import ddpjob_contract as contract
from support.cluster import ROOT, Cluster
from support.manifest import DELETE, as_json, changed, ddpjob, documented, example, examples

NAMESPACE = "admission"
TRAINER = "spec.template.spec.containers.0"
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}
SNAPSHOT = {"path": "/snapshots", "volume": CLAIM}
SIDECAR = {"name": "log", "image": "i"}


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    control_plane.kubectl("create", "namespace", NAMESPACE, check=True)
    yield control_plane
    control_plane.kubectl("delete", "ddpjobs", "--all", "-n", NAMESPACE, "--wait=false")


def apply(plane: Cluster, body: dict[str, Any], *args: str) -> str:
    """Apply; return what kubectl said if it was refused, else an empty string."""
    done = plane.kubectl("apply", "-n", NAMESPACE, "-f", "-", *args, input=as_json(body))
    return done.stderr if done.returncode else ""


def read(plane: Cluster, name: str) -> dict[str, Any]:
    done = plane.kubectl("get", "ddpjob", name, "-n", NAMESPACE, "-o", "json", check=True)
    body: dict[str, Any] = json.loads(done.stdout)
    return body


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """A change that makes a good DDPJob bad; ``says``: the field, and words of the cure."""

    path: str
    value: Any
    says: tuple[str, ...]
    base: dict[str, Any] = dataclasses.field(default_factory=dict)


BAD = {
    # --- the issue's list
    "replicas 0": Bad("spec.replicas", 0, ("spec.replicas", "greater than or equal to 1")),
    "name too long": Bad("metadata.name", "x" * 62, ("metadata.name", "at most 61 characters")),
    "our variable": Bad(
        f"{TRAINER}.env.0",
        {"name": "MASTER_ADDR", "value": "x"},
        ("containers[0].env[0].name", "MASTER_ADDR is set by ddpjob", "remove it"),
    ),
    "unknown field": Bad("spec.replica", 3, ('unknown field "spec.replica"',)),
    "nprocPerNode 0": Bad("spec.nprocPerNode", 0, ("spec.nprocPerNode", "from 1 to 64")),
    "restartPolicy Always": Bad(
        "spec.template.spec.restartPolicy",
        "Always",
        ("spec.template.spec.restartPolicy", "must be Never or left out"),
    ),
    "no grace": Bad(
        "spec.template.spec.terminationGracePeriodSeconds",
        0,
        ("spec.template.spec.terminationGracePeriodSeconds", "at least 1", "beside them"),
    ),
    # --- names
    "name with a dot": Bad("metadata.name", "a.b", ("metadata.name", "DNS-1035")),
    "name with a digit first": Bad("metadata.name", "1a", ("metadata.name", "DNS-1035")),
    "name beyond a label": Bad("metadata.name", "x" * 64, ("metadata.name", "63")),
    "name too long at 10000": Bad(
        "metadata.name",
        "x" * 59,
        ("metadata.name", "at most 58 characters"),
        base={"replicas": 10000},
    ),
    "name too long at 11": Bad(
        "metadata.name", "x" * 61, ("metadata.name", "at most 60 characters"), base={"replicas": 11}
    ),
    # --- numbers
    "replicas 10001": Bad("spec.replicas", 10001, ("spec.replicas", "less than or equal")),
    "replicas missing": Bad("spec.replicas", DELETE, ("spec.replicas", "Required")),
    "replicas a word": Bad("spec.replicas", "three", ("spec.replicas", "integer")),
    "nprocPerNode 65": Bad("spec.nprocPerNode", 65, ("spec.nprocPerNode", "from 1 to 64")),
    "nprocPerNode quoted": Bad("spec.nprocPerNode", "4", ("spec.nprocPerNode", "without quotes")),
    "nprocPerNode gpu": Bad("spec.nprocPerNode", "gpu", ("spec.nprocPerNode", '"auto"')),
    **{
        f"more processes than GPUs, {limit!r}": Bad(
            f"{TRAINER}.resources.limits",
            {"nvidia.com/gpu": limit, "memory": "1Gi"},
            ("spec.nprocPerNode", "nvidia.com/gpu", "GPU of its own"),
            base={"nprocPerNode": 8},
        )
        for limit in (1, 7, "4")
    },
    "port 80": Bad("spec.port", 80, ("spec.port", "1024")),
    "metrics port 70000": Bad("spec.metrics.port", 70000, ("spec.metrics.port", "65535")),
    "ports equal": Bad("spec.metrics.port", 29500, ("spec.metrics", "must differ from spec.port")),
    "maxRestarts -1": Bad("spec.restart.maxRestarts", -1, ("spec.restart.maxRestarts", "0")),
    "maxDisruptions -1": Bad(
        "spec.restart.maxDisruptions", -1, ("spec.restart.maxDisruptions", "0")
    ),
    "backoff initial 0": Bad(
        "spec.restart.backoff.initialSeconds", 0, ("spec.restart.backoff.initialSeconds",)
    ),
    "backoff reversed": Bad(
        "spec.restart.backoff.initialSeconds",
        301,
        ("spec.restart.backoff", "must not be greater than maxSeconds"),
    ),
    "healAfterSeconds -1": Bad(
        "spec.restart.healAfterSeconds", -1, ("spec.restart.healAfterSeconds", "0")
    ),
    **{
        f"progress path {path!r}": Bad(
            "spec.restart.progressPath", path, ("spec.restart.progressPath", "/data/checkpoints")
        )
        for path in (
            "checkpoints",
            "/a/",
            "/a//b",
            "/a/../b",
            "/a/.",
            "/a/$(NAME)",
            "/a*/b",
            "/a\nb",
            "/proc/1",
        )
    },
    "progress path empty": Bad("spec.restart.progressPath", "", ("spec.restart.progressPath",)),
    "rounds 0": Bad("spec.restart.inPlace.maxWithoutProgress", 0, ("inPlace.maxWithoutProgress",)),
    "startup deadline 0": Bad("spec.startupDeadlineSeconds", 0, ("spec.startupDeadlineSeconds",)),
    "active deadline 0": Bad("spec.activeDeadlineSeconds", 0, ("spec.activeDeadlineSeconds",)),
    "ttl -1": Bad("spec.ttlSecondsAfterFinished", -1, ("spec.ttlSecondsAfterFinished",)),
    "hang startup 0": Bad("spec.hang.startupSeconds", 0, ("spec.hang.startupSeconds",)),
    "hang step 0": Bad("spec.hang.stepSeconds", 0, ("spec.hang.stepSeconds",)),
    "hang snapshot 0": Bad("spec.hang.snapshotSeconds", 0, ("spec.hang.snapshotSeconds",)),
    "nodeLost after 0": Bad("spec.nodeLost.afterSeconds", 0, ("spec.nodeLost.afterSeconds",)),
    # --- words
    "cleanPodPolicy None": Bad("spec.cleanPodPolicy", "None", ("spec.cleanPodPolicy", '"All"')),
    "nodeLost policy": Bad("spec.nodeLost.policy", "Kill", ("spec.nodeLost.policy", '"Fence"')),
    "Fence without snapshot": Bad(
        "spec.nodeLost.policy", "Fence", ("spec.nodeLost", "Fence needs spec.snapshot")
    ),
    # --- rules
    "rule with both": Bad(
        "spec.restart.rules.0",
        {"exitCodes": [3], "reasons": ["Evicted"], "action": "Fail"},
        ("spec.restart.rules[0]", "exactly one of exitCodes and reasons"),
    ),
    "rule with neither": Bad(
        "spec.restart.rules.0",
        {"action": "Fail"},
        ("spec.restart.rules[0]", "exactly one of exitCodes and reasons"),
    ),
    "rule without action": Bad(
        "spec.restart.rules.0", {"exitCodes": [3]}, ("spec.restart.rules[0].action", "Required")
    ),
    "rule for success": Bad(
        "spec.restart.rules.0",
        {"exitCodes": [0], "action": "Restart"},
        ("spec.restart.rules[0].exitCodes[0]",),
    ),
    "rule code twice": Bad(
        "spec.restart.rules.0",
        {"exitCodes": [3, 3], "action": "Fail"},
        ("spec.restart.rules[0].exitCodes[1]", "Duplicate"),
    ),
    # --- snapshot
    "snapshot without volume": Bad(
        "spec.snapshot", {"path": "/s"}, ("spec.snapshot.volume", "Required")
    ),
    "snapshot without path": Bad(
        "spec.snapshot", {"volume": CLAIM}, ("spec.snapshot.path", "Required")
    ),
    "volume empty": Bad(
        "spec.snapshot.volume", {}, ("spec.snapshot.volume",), {"snapshot": SNAPSHOT}
    ),
    "volume of two types": Bad(
        "spec.snapshot.volume.emptyDir", {}, ("spec.snapshot.volume",), {"snapshot": SNAPSHOT}
    ),
    "volume with a name": Bad(
        "spec.snapshot.volume.name", "v", ("spec.snapshot.volume",), {"snapshot": SNAPSHOT}
    ),
    "claim without name": Bad(
        "spec.snapshot.volume.persistentVolumeClaim",
        {},
        ("persistentVolumeClaim.claimName", "Required"),
        {"snapshot": SNAPSHOT},
    ),
    "claim read-only": Bad(
        "spec.snapshot.volume.persistentVolumeClaim.readOnly",
        True,
        ("spec.snapshot.volume", "must be false or left out"),
        {"snapshot": SNAPSHOT},
    ),
    **{
        f"snapshot path {path}": Bad(
            "spec.snapshot.path", path, ("spec.snapshot.path", "/snapshots"), {"snapshot": SNAPSHOT}
        )
        for path in (
            "snapshots",
            "/",
            "/a:b",
            "/snapshots/$(DDPJOB_NAME)",
            "/a\tb",
            "/a/",
            "/a//b",
            "/a/../b",
            "/a/.",
            "/dev/shm",
            "/proc",
        )
    },
    "everySteps 0": Bad(
        "spec.snapshot.everySteps", 0, ("spec.snapshot.everySteps",), {"snapshot": SNAPSHOT}
    ),
    "keep 0": Bad("spec.snapshot.keep", 0, ("spec.snapshot.keep",), {"snapshot": SNAPSHOT}),
    "resume No": Bad(
        "spec.snapshot.resume", "No", ("spec.snapshot.resume", '"Never"'), {"snapshot": SNAPSHOT}
    ),
    "mount at the snapshot path": Bad(
        f"{TRAINER}.volumeMounts.0",
        {"name": "mine", "mountPath": "/snapshots/"},
        ("spec.snapshot.path", "mountPath", "remove that mount"),
        {"snapshot": SNAPSHOT},
    ),
    # --- template
    "template missing": Bad("spec.template", DELETE, ("spec.template", "Required")),
    "no container": Bad("spec.template.spec.containers", [], ("spec.template.spec.containers",)),
    "containers missing": Bad(
        "spec.template.spec.containers", DELETE, ("spec.template.spec.containers", "Required")
    ),
    "container without name": Bad(f"{TRAINER}.name", DELETE, ("containers[0].name", "Required")),
    "container twice": Bad(
        "spec.template.spec.containers.1",
        {"name": "trainer", "image": "i"},
        ("spec.template.spec.containers[1]", "Duplicate"),
    ),
    "container and init container": Bad(
        "spec.template.spec.initContainers.0",
        {"name": "trainer", "image": "i"},
        ("spec.template.spec.initContainers", "unique"),
    ),
    "our prefix": Bad(
        f"{TRAINER}.env.0",
        {"name": "DDPJOB_ANYTHING", "value": "x"},
        ("containers[0].env[0].name", "DDPJOB_ANYTHING is set by ddpjob"),
    ),
    "our variable in a sidecar": Bad(
        "spec.template.spec.containers.1",
        {**SIDECAR, "env": [{"name": "RANK", "value": "0"}]},
        ("containers[1].env[0].name", "RANK is set by ddpjob"),
    ),
    "our variable in an init container": Bad(
        "spec.template.spec.initContainers.0",
        {**SIDECAR, "env": [{"name": "WORLD_SIZE", "value": "0"}]},
        ("initContainers[0].env[0].name", "WORLD_SIZE is set by ddpjob"),
    ),
    "container restartPolicy": Bad(
        f"{TRAINER}.restartPolicy", "OnFailure", ("containers[0].restartPolicy", "spec.restart")
    ),
    "container restart rules": Bad(
        f"{TRAINER}.restartPolicyRules.0",
        {"action": "Restart", "exitCodes": {"operator": "In", "values": [3]}},
        ("containers[0].restartPolicyRules", "spec.restart.rules"),
    ),
    "native sidecar": Bad(
        "spec.template.spec.initContainers.0",
        {**SIDECAR, "restartPolicy": "Always"},
        ("initContainers[0].restartPolicy", "move a sidecar to spec.template.spec.containers"),
    ),
    "init restart rules": Bad(
        "spec.template.spec.initContainers.0",
        {**SIDECAR, "restartPolicyRules": [{"action": "Restart"}]},
        ("initContainers[0].restartPolicyRules", "spec.restart.rules"),
    ),
    "hostname": Bad("spec.template.spec.hostname", "h", ("template.spec.hostname", "remove it")),
    "subdomain": Bad("spec.template.spec.subdomain", "s", ("template.spec.subdomain", "remove it")),
    "our volume": Bad(
        "spec.template.spec.volumes.0",
        {"name": "ddpjob-shm", "emptyDir": {}},
        ("spec.template.spec.volumes[0].name", "choose another name"),
    ),
    "volume twice": Bad(
        "spec.template.spec.volumes",
        [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}],
        ("spec.template.spec.volumes[1]", "Duplicate"),
    ),
    "our volume mounted": Bad(
        f"{TRAINER}.volumeMounts.0",
        {"name": "ddpjob-snapshot", "mountPath": "/x"},
        ("containers[0].volumeMounts[0].name", "choose another name"),
    ),
    "our volume mounted in an init container": Bad(
        "spec.template.spec.initContainers.0",
        {**SIDECAR, "volumeMounts": [{"name": "ddpjob-snapshot", "mountPath": "/x"}]},
        ("initContainers[0].volumeMounts[0].name", "choose another name"),
    ),
    "sidecar on our port": Bad(
        "spec.template.spec.containers.1",
        {**SIDECAR, "ports": [{"containerPort": 29500}]},
        ("spec.template", "containerPort equal to spec.port"),
    ),
    "sidecar on the metrics port": Bad(
        "spec.template.spec.containers.1",
        {**SIDECAR, "ports": [{"containerPort": 9400}]},
        ("spec.template", "spec.metrics.port"),
    ),
    "two containers, none called trainer": Bad(
        "spec.template.spec.containers",
        [{"name": "main", "image": "i"}, SIDECAR],
        ("spec.template.spec.containers", "must be named trainer: rename it"),
    ),
    "first container is no trainer": Bad(
        "spec.template.spec.containers",
        [{**SIDECAR, "ports": [{"containerPort": 29500}]}, {"name": "trainer", "image": "i"}],
        ("spec.template", "containerPort equal to spec.port"),
    ),
    "our label": Bad(
        "spec.template.metadata",
        {"labels": {"ddpjob.dev/attempt": "1"}},
        ("spec.template.metadata.labels", "remove them"),
    ),
    "our annotation": Bad(
        "spec.template.metadata",
        {"annotations": {"ddpjob.dev/x": "1"}},
        ("spec.template.metadata.annotations", "remove them"),
    ),
    "template name": Bad(
        "spec.template.metadata",
        {"name": "pod"},
        ('unknown field "spec.template.metadata.name"',),
    ),
    "unknown nested field": Bad(
        "spec.restart.maxRestart", 3, ('unknown field "spec.restart.maxRestart"',)
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_refuses(plane: Cluster, case: Bad) -> None:
    good = ddpjob("bad", **case.base)
    said = apply(plane, changed(good, case.path, case.value))
    for words in case.says:
        assert words in said, f"{words!r} is not in: {said or 'accepted'}"


def test_the_base_of_bad_cases_is_good(plane: Cluster) -> None:
    """So that what is refused above is refused for the change alone."""
    for base in (
        {},
        {"snapshot": SNAPSHOT},
        {"replicas": 10000},
        {"replicas": 11},
        {"nprocPerNode": 8},
    ):
        assert apply(plane, ddpjob("base", **base), "--dry-run=server") == ""


def test_refuses_every_reserved_variable(plane: Cluster) -> None:
    names = [*contract.RESERVED_ENV, contract.HUB_PORT, contract.NAME]
    body = changed(ddpjob("env"), f"{TRAINER}.env", [{"name": name} for name in names])
    said = apply(plane, body)
    for name in names:
        assert f"environment variable {name} is set by ddpjob" in said


# --- what is accepted ---------------------------------------------------------------------

GOOD = {
    "longest name": ("metadata.name", "x" * 61),
    "sidecar": (
        "spec.template.spec.containers.1",
        {**SIDECAR, "ports": [{"containerPort": 8080}]},
    ),
    "trainer names our ports": (
        f"{TRAINER}.ports",
        [{"containerPort": 29500}, {"containerPort": 9400}],
    ),
    "PYTHONUNBUFFERED": (f"{TRAINER}.env", [{"name": "PYTHONUNBUFFERED", "value": "0"}]),
    "what the trainer asks the user for": (
        f"{TRAINER}.env",
        [{"name": name, "value": "x"} for name in contract.USER_ENV],
    ),
    "variable from a secret": (
        f"{TRAINER}.env",
        [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    ),
    "grace 1": ("spec.template.spec.terminationGracePeriodSeconds", 1),
    "restartPolicy Never": ("spec.template.spec.restartPolicy", "Never"),
    "any pod field": (
        "spec.template.spec.tolerations",
        [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    ),
    "client library's null": (
        "spec.template.metadata",
        {"creationTimestamp": None, "labels": {"team": "a"}},
    ),
    "nprocPerNode 64": ("spec.nprocPerNode", 64),
    **{
        f"GPUs for each process, {limit!r}": (
            "spec",
            changed(ddpjob(nprocPerNode=4), f"{TRAINER}.resources.limits", limits)["spec"],
        )
        for limit, limits in {
            4: {"nvidia.com/gpu": 4, "cpu": 0.5},
            "8": {"nvidia.com/gpu": "8", "memory": "1Gi"},
            "0": {"nvidia.com/gpu": 0},
            "of MIG": {"nvidia.com/mig-1g.5gb": 1},
        }.items()
    },
    "any snapshot volume": (
        "spec.snapshot",
        {"path": "/a/b", "volume": {"nfs": {"server": "s", "path": "/p"}}},
    ),
    "Fence with snapshot": (
        "spec",
        {**ddpjob()["spec"], "snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence"}},
    ),
    "rules": (
        "spec.restart.rules",
        [
            {"exitCodes": [3, 137], "action": "Fail"},
            {"reasons": ["Evicted", "PreemptionByScheduler"], "action": "RestartFree"},
        ],
    ),
    "one container of any name": ("spec.template.spec.containers", [SIDECAR]),
    "maxRestarts 0": ("spec.restart.maxRestarts", 0),
    "healAfterSeconds 0": ("spec.restart.healAfterSeconds", 0),
    "progress path": ("spec.restart.progressPath", "/data/my run:1/last.ckpt"),
    "progress path with a pattern": ("spec.restart.progressPath", "/out/checkpoint-*"),
    "ttl 0": ("spec.ttlSecondsAfterFinished", 0),
}


@pytest.mark.parametrize(("path", "value"), GOOD.values(), ids=GOOD)
def test_accepts(plane: Cluster, path: str, value: Any) -> None:
    assert apply(plane, changed(ddpjob("good"), path, value), "--dry-run=server") == ""


@pytest.mark.parametrize("name", examples())
def test_accepts_the_examples(plane: Cluster, name: str) -> None:
    for body in example(name):
        assert apply(plane, body, "--dry-run=server") == ""


@pytest.mark.parametrize(("place", "body"), documented(), ids=[place for place, _ in documented()])
def test_accepts_what_the_pages_show(plane: Cluster, place: str, body: dict[str, Any]) -> None:
    assert apply(plane, body, "--dry-run=server") == "", place


def test_keeps_the_template_as_written(plane: Cluster) -> None:
    resources = {"limits": {"nvidia.com/gpu": 8}, "claims": [{"name": "later"}]}
    body = changed(ddpjob("kept"), f"{TRAINER}.resources", resources)
    body = changed(body, "spec.template.spec.someFutureField", {"deep": [1, "x"]})
    assert apply(plane, body) == ""
    assert read(plane, "kept")["spec"]["template"] == body["spec"]["template"]


def test_defaults(plane: Cluster) -> None:
    assert apply(plane, ddpjob("defaults", snapshot=SNAPSHOT)) == ""
    spec = read(plane, "defaults")["spec"]
    del spec["template"]
    assert spec == {
        "replicas": 3,
        "nprocPerNode": "auto",
        "port": 29500,
        "suspend": False,
        "restart": {
            "maxRestarts": 3,
            "maxDisruptions": 100,
            "backoff": {"initialSeconds": 1, "maxSeconds": 300},
            "inPlace": {"enabled": True, "maxWithoutProgress": 3, "drill": "Auto"},
            "healAfterSeconds": 3600,
        },
        "snapshot": {**SNAPSHOT, "everySteps": 50, "keep": 3, "resume": "Auto"},
        "hang": {"startupSeconds": 600, "stepSeconds": 300, "snapshotSeconds": 600},
        "nodeLost": {"policy": "Wait", "afterSeconds": 30},
        "startupDeadlineSeconds": 600,
        "cleanPodPolicy": "Running",
        "metrics": {"port": 9400},
        "networkPolicy": {"enabled": True},
    }


def test_defaults_of_what_a_user_opens(plane: Cluster) -> None:
    """A field of hang or restart.inPlace that is left out has its default all the same."""
    body = ddpjob(
        "opened", hang={"stepSeconds": 60}, restart={"inPlace": {"maxWithoutProgress": 9}}
    )
    assert apply(plane, body) == ""
    spec = read(plane, "opened")["spec"]
    assert spec["hang"] == {"startupSeconds": 600, "stepSeconds": 60, "snapshotSeconds": 600}
    in_place = {"enabled": True, "maxWithoutProgress": 9, "drill": "Auto"}
    assert spec["restart"]["inPlace"] == in_place


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("ddpjob", "DistributedDataParallel"),
        ("ddpjob.spec.restart", "When and how often the gang comes back"),
        ("ddpjob.spec.restart.maxRestarts", "Exactly so many restarts"),
        ("ddpjob.spec.template.spec.containers.env", "Environment variables"),
        ("ddpjob.status.lastFailure.class", "What kind of failure"),
    ],
)
def test_explains(plane: Cluster, field: str, words: str) -> None:
    done = plane.kubectl("explain", field, check=True)
    assert words in " ".join(done.stdout.split())


def test_install_manifest_is_accepted(plane: Cluster) -> None:
    """Strictly and by Pod Security: its namespace enforces the restricted standard."""
    plane.kubectl("create", "namespace", "ddpjob-system", check=True)
    manifest = str(ROOT / "manifests" / "install.yaml")
    done = plane.kubectl("apply", "--dry-run=server", "-f", manifest)
    assert done.returncode == 0, done.stderr
    assert "deployment.apps/ddpjob-operator created" in done.stdout
    assert "would violate PodSecurity" not in done.stderr
