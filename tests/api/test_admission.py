"""What the API server says to good and bad DDPJobs; a dry run each, all answers at once."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_contract.crd import DEFAULTS
from support.cluster import Cluster
from support.manifest import DELETE, EXAMPLES, changed, ddpjob, documented
from support.rest import JOBS, Object, Rest, RestError

NAMESPACE = "admission"
POD = "spec.template.spec"
TRAINER = f"{POD}.containers.0"
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}
SNAPSHOT = {"path": "/snapshots", "volume": CLAIM}
SIDECAR = {"name": "log", "image": "i"}
PATH = f"{JOBS}/namespaces/{NAMESPACE}/ddpjobs"


@pytest.fixture(scope="module")
def rest(control_plane: Cluster) -> Iterator[Rest]:
    control_plane.kubectl("create", "namespace", NAMESPACE, check=True)
    yield Rest(control_plane.kubeconfig)
    control_plane.kubectl("delete", "ddpjobs", "--all", "-n", NAMESPACE, "--wait=false")


def create(rest: Rest, body: Object, *, dry_run: bool = False) -> Object:
    """Create it as kubectl does: a field that nobody knows is refused."""
    dry = "&dryRun=All" if dry_run else ""
    return rest.post(f"{PATH}?fieldValidation=Strict{dry}", body)


def refusal(rest: Rest, body: Object) -> str:
    """What is said against it; "" where it would be stored."""
    try:
        create(rest, body, dry_run=True)
    except RestError as error:
        return str(error)
    return ""


#: What a good job has beside the least, for changes that need it.
BASES: dict[str, dict[str, Any]] = {
    "": {},
    "snapshot": {"snapshot": SNAPSHOT},
    "10000": {"replicas": 10000},
    "11": {"replicas": 11},
    "10000 and 1": {"replicas": 10000, "standby": 1},
    "standby": {"standby": 1},
    "high": {"scheduling": {"priorityClassName": "high"}},
    "8 processes": {"nprocPerNode": 8},
}

#: What a good job has before -> (the field that is refused, its value, words of the cure).
#: Typos and values that people send by mistake are in odd_manifests.py.
OWN: dict[str, tuple[tuple[Any, ...], ...]] = {
    "": (
        ("metadata.name", "x" * 62, "at most 61 characters"),
        ("spec.nprocPerNode", 0, "from 1 to 64"),
        (f"{POD}.restartPolicy", "Always", "must be Never or left out"),
        (f"{POD}.terminationGracePeriodSeconds", 0, "at least 1", "beside them"),
        ("metadata.name", "1a", "DNS-1035"),
        ("metadata.name", "x" * 64, "63"),
        ("spec.replicas", 10001, "less than or equal"),
        ("spec.replicas", DELETE, "Required"),
        ("spec.standby", 65, "less than or equal"),
        ("spec.standby", -1, "greater than or equal"),
        ("spec.standbyPriorityClassName", "Low"),
        ("spec.scheduling", {"gang": "native"}, "Auto", "Native"),
        ("spec.scheduling", {"gang": "None", "topologyKey": "rack"}, "remove one"),
        ("spec.scheduling.topologyKey", "a b", "topologyKey"),
        ("spec.scheduling.priorityClassName", "High", "priorityClassName"),
        ("spec.nprocPerNode", 65, "from 1 to 64"),
        ("spec.nprocPerNode", "4", "without quotes"),
        ("spec.nprocPerNode", "gpu", '"auto"'),
        ("spec.port", 80, "1024"),
        ("spec.metrics.port", 70000, "65535"),
        ("spec.restart.maxDisruptions", -1, "0"),
        ("spec.restart.backoff.initialSeconds", 0),
        ("spec.restart.healAfterSeconds", -1, "0"),
        ("spec.restart.progressPath", ""),
        ("spec.restart.resumeWhen", "ck/*.pt", "needs spec.restart.resumeArgs"),
        ("spec.restart.resumeArgs", ["--resume={newest}"], "needs spec.restart.resumeWhen"),
        ("spec.restart.resumeArgs", ["--resume", "$(CKPT)"], "nothing is put in its place"),
        ("spec.startupDeadlineSeconds", 0),
        ("spec.activeDeadlineSeconds", 0),
        ("spec.ttlSecondsAfterFinished", -1),
        ("spec.hang.startupSeconds", 0),
        ("spec.hang.stepSeconds", 0),
        ("spec.hang.snapshotSeconds", 0),
        ("spec.nodeLost.afterSeconds", 0),
        ("spec.cleanPodPolicy", "None", '"All"'),
        ("spec.nodeLost.policy", "Kill", '"Fence"'),
        ("spec.restart.rules.0", {"exitCodes": [3], "reasons": ["Evicted"], "action": "Fail"},
         "exactly one of exitCodes and reasons"),
        ("spec.restart.rules.0", {"action": "Fail"}, "exactly one of exitCodes and reasons"),
        ("spec.template", DELETE, "Required"),
        (f"{POD}.containers", []),
        (f"{POD}.containers", DELETE, "Required"),
        (f"{POD}.containers", [{"name": "main", "image": "i"}, SIDECAR],
         "must be named trainer: rename it"),
        *(("spec.restart.progressPath", path, "/data/checkpoints")
          for path in ("checkpoints", "/a/", "/a//b", "/a/../b", "/a/.", "/a/$(NAME)", "/a*/b",
                        "/a\nb", "/proc/1")),
    ),
    "10000": (
        ("metadata.name", "x" * 59, "at most 58 characters"),
    ),
    "10000 and 1": (
        ("metadata.name", "x" * 58, "at most 57 characters"),
    ),
    "11": (
        ("metadata.name", "x" * 61, "at most 60 characters"),
    ),
    "snapshot": (
        ("spec.snapshot.volume", {}),
        *(("spec.snapshot.everySteps", steps, "Auto or a number from 1 to 1000000000")
          for steps in (0, 10**9 + 1, "auto", "50")),
        ("spec.snapshot.keep", 0),
        ("spec.snapshot.resume", "No", '"Never"'),
        *(("spec.snapshot.path", path, "/snapshots")
          for path in ("snapshots", "/", "/a:b", "/snapshots/$(DDPJOB_NAME)", "/a\tb",
                        "/a/", "/a//b", "/a/../b", "/a/.", "/dev/shm", "/proc")),
    ),
}  # fmt: skip
#: The same, refused by a rule that names another field: its name is among the words.
ANOTHER: dict[str, tuple[tuple[Any, ...], ...]] = {
    "": (
        (f"{TRAINER}.env.0", {"name": "MASTER_ADDR", "value": "x"}, "containers[0].env[0].name",
         "MASTER_ADDR is set by ddpjob", "remove it"),
        ("spec.metrics.port", 29500, "spec.metrics", "must differ from spec.port"),
        ("spec.restart.backoff.initialSeconds", 301, "spec.restart.backoff",
         "must not be greater than maxSeconds"),
        ("spec.restart.inPlace.maxWithoutProgress", 0, "inPlace.maxWithoutProgress"),
        ("spec.nodeLost.policy", "Fence", "spec.nodeLost", "Fence needs spec.snapshot"),
        ("spec.restart.rules.0", {"exitCodes": [3]}, "spec.restart.rules[0].action", "Required"),
        ("spec.restart.rules.0", {"exitCodes": [0], "action": "Restart"},
         "spec.restart.rules[0].exitCodes[0]"),
        ("spec.restart.rules.0", {"exitCodes": [3, 3], "action": "Fail"},
         "spec.restart.rules[0].exitCodes[1]", "Duplicate"),
        ("spec.snapshot", {"path": "/s"}, "spec.snapshot.volume", "Required"),
        ("spec.snapshot", {"volume": CLAIM}, "spec.snapshot.path", "Required"),
        (f"{TRAINER}.name", DELETE, "containers[0].name", "Required"),
        (f"{POD}.initContainers.0", {"name": "trainer", "image": "i"},
         "spec.template.spec.initContainers", "unique"),
        (f"{TRAINER}.env.0", {"name": "DDPJOB_ANYTHING", "value": "x"}, "containers[0].env[0].name",
         "DDPJOB_ANYTHING is set by ddpjob"),
        (f"{TRAINER}.restartPolicy", "OnFailure", "containers[0].restartPolicy", "spec.restart"),
        (f"{TRAINER}.restartPolicyRules.0",
         {"action": "Restart", "exitCodes": {"operator": "In", "values": [3]}},
         "containers[0].restartPolicyRules", "spec.restart.rules"),
        (f"{POD}.initContainers.0", {**SIDECAR, "restartPolicy": "OnFailure"},
         "initContainers[0].restartPolicy", "must be Always", "native sidecar"),
        (f"{POD}.initContainers.0",
         {**SIDECAR, "restartPolicy": "Always", "ports": [{"containerPort": 9400}]},
         "spec.template", "containerPort equal to spec.port"),
        (f"{POD}.initContainers.0", {**SIDECAR, "restartPolicyRules": [{"action": "Restart"}]},
         "initContainers[0].restartPolicyRules", "spec.restart.rules"),
        (f"{POD}.hostname", "h", "template.spec.hostname", "remove it"),
        (f"{POD}.subdomain", "s", "template.spec.subdomain", "remove it"),
        (f"{POD}.volumes.0", {"name": "ddpjob-shm", "emptyDir": {}},
         "spec.template.spec.volumes[0].name", "choose another name"),
        (f"{POD}.volumes", [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}],
         "spec.template.spec.volumes[1]", "Duplicate"),
        (f"{TRAINER}.volumeMounts.0", {"name": "ddpjob-snapshot", "mountPath": "/x"},
         "containers[0].volumeMounts[0].name", "choose another name"),
        (f"{POD}.initContainers.0",
         {**SIDECAR, "volumeMounts": [{"name": "ddpjob-snapshot", "mountPath": "/x"}]},
         "initContainers[0].volumeMounts[0].name", "choose another name"),
        (f"{POD}.containers.1", {**SIDECAR, "ports": [{"containerPort": 29500}]}, "spec.template",
         "containerPort equal to spec.port"),
        (f"{POD}.containers.1", {**SIDECAR, "ports": [{"containerPort": 9400}]}, "spec.template",
         "spec.metrics.port"),
        (f"{POD}.containers",
         [{**SIDECAR, "ports": [{"containerPort": 29500}]}, {"name": "trainer", "image": "i"}],
         "spec.template", "containerPort equal to spec.port"),
        ("spec.template.metadata", {"labels": {"ddpjob.dev/attempt": "1"}},
         "spec.template.metadata.labels", "remove them"),
        ("spec.template.metadata", {"annotations": {"ddpjob.dev/x": "1"}},
         "spec.template.metadata.annotations", "remove them"),
        ("spec.template.metadata", {"name": "pod"}, 'unknown field "spec.template.metadata.name"'),
        ("spec.restart.maxRestart", 3, 'unknown field "spec.restart.maxRestart"'),
    ),
    "snapshot": (
        ("spec.snapshot.volume.emptyDir", {}, "spec.snapshot.volume"),
        ("spec.snapshot.volume.name", "v", "spec.snapshot.volume"),
        ("spec.snapshot.volume.persistentVolumeClaim", {}, "persistentVolumeClaim.claimName",
         "Required"),
        ("spec.snapshot.volume.persistentVolumeClaim.readOnly", True, "spec.snapshot.volume",
         "must be false or left out"),
        (f"{TRAINER}.volumeMounts.0", {"name": "mine", "mountPath": "/snapshots/"},
         "spec.snapshot.path", "mountPath", "remove that mount"),
    ),
    "high": ((f"{POD}.priorityClassName", "low", "spec.scheduling", "remove one"),),
    "standby": tuple(
        (path, value, "spec.standby needs at least 2 replicas")
        for path, value in (("spec.replicas", 1), ("spec.restart.maxRestarts", 0),
                            ("spec.restart.inPlace.enabled", False),
                            ("spec.restart.replaceSeconds", 0))
    ),
}  # fmt: skip


def field(path: str) -> str:
    """Return a dotted path as the API server writes it."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def test_refuses_and_names_field_and_cure(rest):
    for base in BASES.values():  # so that what is refused below is refused for the change alone
        assert refusal(rest, ddpjob("good", **base)) == ""
    cases: list[tuple[str, str, Any, list[str]]] = []
    for base, rows in OWN.items():
        cases += [(base, path, value, [field(path), *words]) for path, value, *words in rows]
    for base, rows in ANOTHER.items():
        cases += [(base, path, value, words) for path, value, *words in rows]
    for limit in (1, 7, "4"):
        limits = {"nvidia.com/gpu": limit, "memory": "1Gi"}
        words = ["spec.nprocPerNode", "nvidia.com/gpu", "its own GPU"]
        cases.append(("8 processes", f"{TRAINER}.resources.limits", limits, words))
    wrong = []
    for base, path, value, words in cases:
        said = refusal(rest, changed(ddpjob("bad", **BASES[base]), path, value))
        if lacking := [word for word in words if word not in said]:
            wrong.append((path, value, f"{lacking} not in: {said or 'accepted'}"))
    assert wrong == []


def test_refuses_every_reserved_variable(rest):
    names = [*contract.RESERVED_ENV, contract.HUB_PORT, contract.NAME]
    container = {**SIDECAR, "env": [{"name": name} for name in names]}
    for where in (f"{POD}.containers.1", f"{POD}.initContainers.0"):
        said = refusal(rest, changed(ddpjob("env"), where, container))
        assert [n for n in names if f"environment variable {n} is set by ddpjob" not in said] == []
        assert f"{field(where)}.env[0].name" in said


# --- what is accepted ---------------------------------------------------------------------

GOOD = (
    ("metadata.name", "x" * 61),
    (f"{POD}.containers.1", {**SIDECAR, "ports": [{"containerPort": 8080}]}),
    (f"{POD}.initContainers.0", {**SIDECAR, "restartPolicy": "Always"}),
    (f"{POD}.initContainers.0", {**SIDECAR, "ports": [{"containerPort": 9400}]}),
    (f"{TRAINER}.ports", [{"containerPort": 29500}, {"containerPort": 9400}]),
    (f"{TRAINER}.env", [{"name": "PYTHONUNBUFFERED", "value": "0"}]),
    (f"{TRAINER}.env", [{"name": name, "value": "x"} for name in contract.USER_ENV]),
    (f"{TRAINER}.env.0", {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}),
    (f"{POD}.terminationGracePeriodSeconds", 1),
    (f"{POD}.restartPolicy", "Never"),
    (f"{POD}.priorityClassName", "high"),
    (f"{POD}.tolerations", [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]),
    # A client library writes such a null.
    ("spec.template.metadata", {"creationTimestamp": None, "labels": {"team": "a"}}),
    ("spec.nprocPerNode", 64),
    *(
        ("spec", changed(ddpjob(nprocPerNode=4), f"{TRAINER}.resources.limits", limits)["spec"])
        for limits in (
            {"nvidia.com/gpu": 4, "cpu": 0.5},
            {"nvidia.com/gpu": "8", "memory": "1Gi"},
            {"nvidia.com/gpu": 0},
            {"nvidia.com/mig-1g.5gb": 1},
        )
    ),
    ("spec.snapshot", {"path": "/a/b", "volume": {"nfs": {"server": "s", "path": "/p"}}}),
    ("spec", {**ddpjob()["spec"], "snapshot": SNAPSHOT, "nodeLost": {"policy": "Fence"}}),
    ("spec.restart.rules.0", {"exitCodes": [3, 137], "action": "Fail"}),
    ("spec.restart.rules.0", {"reasons": ["Evicted", "Preempted"], "action": "RestartFree"}),
    (f"{POD}.containers", [SIDECAR]),
    ("spec.restart.maxRestarts", 0),
    ("spec.restart.healAfterSeconds", 0),
    ("spec.restart.progressPath", "/data/my run:1/last.ckpt"),
    ("spec.restart.progressPath", "/out/checkpoint-*"),
    ("spec.restart", {"resumeArgs": ["--resume", "{newest}"], "resumeWhen": "ck/*.pt"}),
    ("spec.restart.resumeArgs", ["--init_from=resume"]),
    ("spec.ttlSecondsAfterFinished", 0),
)


def test_accepts(rest):
    said = [(path, refusal(rest, changed(ddpjob("good"), path, value))) for path, value in GOOD]
    said += [(place, refusal(rest, body)) for place, body in documented()]
    assert [one for one in said if one[1]] == []


def test_accepts_the_examples(rest, control_plane):
    command = ("apply", "-n", NAMESPACE, "--dry-run=server", "-R", "-f", str(EXAMPLES))
    control_plane.kubectl(*command, check=True)


def test_keeps_the_template_as_written(rest):
    resources = {"limits": {"nvidia.com/gpu": 8}, "claims": [{"name": "later"}]}
    body = changed(ddpjob("kept"), f"{TRAINER}.resources", resources)
    body = changed(body, f"{POD}.someFutureField", {"deep": [1, "x"]})
    assert create(rest, body)["spec"]["template"] == body["spec"]["template"]


def leaves(fields: Object, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def test_defaults_come_also_beside_what_a_user_has_opened(rest):
    given = {
        "snapshot": SNAPSHOT,
        "hang": {"stepSeconds": 60},
        "restart": {"inPlace": {"maxWithoutProgress": 9}},
    }
    body = ddpjob("defaults", **given)
    stored = create(rest, body)["spec"]
    assert dict(leaves(stored)) == {**DEFAULTS, **dict(leaves(body["spec"]))}
    least = dict(leaves(create(rest, ddpjob("least"))["spec"]))
    expected = {path: v for path, v in DEFAULTS.items() if not path.startswith("snapshot.")}
    assert {path: least.get(path) for path in expected} == expected


def test_explains(control_plane):
    for field, words in (
        ("ddpjob", "DistributedDataParallel"),
        ("ddpjob.spec.restart.maxRestarts", "Restarts allowed for failures"),
        ("ddpjob.spec.template.spec.containers.env", "Environment variables"),
        ("ddpjob.status.lastFailure.class", "Kind of failure"),
    ):
        done = control_plane.kubectl("explain", field, check=True)
        assert words in " ".join(done.stdout.split())
