"""Stories of a job whose spec no pod can be made of any more: refused, but never frozen."""

from typing import Any

import pytest

from ddpjob_operator.core import actions as act
from ddpjob_operator.core.objects import compact_spec
from support.world import World, crd_schema, job_object, running, started

OTHER = {"spec": {"containers": [{"name": "trainer", "image": "other"}]}}
#: What a spec may turn into, and the reason that is told: an edit that CEL does not see, and a
#: spec that an older operator took and this one does not.
BROKEN = {"TemplateChanged": {"template": OTHER}, "SpecInvalid": {"nprocPerNode": "many"}}
broken = pytest.mark.parametrize(("reason", "spec"), BROKEN.items(), ids=BROKEN)


def mend(world: World, spec: dict[str, Any]) -> World:
    original = {"nprocPerNode": "auto", **job_object()["spec"]}
    return world.patch(**{field: original[field] for field in spec})


@pytest.mark.fault("U1")
@broken
def test_a_gang_that_runs_goes_on_to_its_end(reason, spec):
    world = running().patch(**spec)
    assert (world.phase, world.status["attempt"], len(world.pods)) == ("Running", 1, 3)
    told = world.condition("Invalid")
    assert (told["reason"], "suspend" in told["message"]) == (reason, reason == "TemplateChanged")
    assert (len(world.told(reason)), world.status["observedGeneration"]) == (1, 2)
    assert world.end(0, 0).end(1, 0).end(2, 0).phase == "Succeeded"


@pytest.mark.fault("U1")
@broken
@pytest.mark.parametrize("how", ["killed", "vanished"])
def test_a_loss_is_counted_the_gang_released_and_nothing_made(reason, spec, how):
    world = running().patch(**spec)
    world = world.end(0, 1) if how == "killed" else world.vanish(0)
    assert (world.phase, world.status["attempt"], world.pods) == ("Restarting", 2, {})
    assert (world.counts[0], world.loss["replica"]) == (1, 0)
    assert (world.wait(10_000).pods, len(world.told(reason))) == ({}, 1)
    mend(world, spec).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 2)
    assert world.condition("Invalid")["status"] == "False"
    assert world.pods["job-0"]["spec"]["containers"][0]["image"] == "trainer"


@broken
def test_a_failure_for_good_and_a_deadline_still_end_it(reason, spec):
    assert running().patch(**spec).end(0, 2).phase == "Failed"
    world = started(activeDeadlineSeconds=60).run().patch(**spec).wait(60)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"


@broken
def test_a_gang_that_cannot_become_whole_any_more_is_released(reason, spec):
    world = World()
    while "Starting" not in str(world.job.get("status")):
        world.carry_out(world.plan().actions[0])
    world.feedback = act.ApiFeedback(act.QuorumRead(1, world.now), begun=1, network_attempt=1)
    world.carry_out(world.plan().actions[0])
    assert len(world.pods) == 1
    world.patch(**spec)
    assert (world.phase, world.pods, world.counts[0]) == ("Pending", {}, 0)
    assert len(mend(world, spec).pods) == 3


def snapshot(**hostpath: str) -> dict[str, Any]:
    return {"path": "/snapshots", "volume": {"hostPath": hostpath}}


def test_another_volume_of_snapshots_is_taken_by_no_attempt():
    """CEL takes {path: /a} and {type: ""} for equal, since it knows neither field."""
    world = started(snapshot=snapshot(path="/a")).run().patch(snapshot=snapshot(type=""))
    assert (world.phase, len(world.pods)) == ("Running", 3)
    assert world.condition("Invalid")["reason"] == "SnapshotChanged"
    world.end(0, 1)
    assert (world.phase, world.status["attempt"], world.pods) == ("Restarting", 2, {})
    world.patch(suspend=True).patch(suspend=False)
    assert (world.phase, world.pods) == ("Suspended", {})
    assert world.condition("Invalid")["reason"] == "SnapshotChanged"
    assert world.patch(snapshot=snapshot(path="/a")).run().phase == "Running"
    assert world.condition("Invalid")["status"] == "False"


def test_a_volume_that_an_older_operator_left_out_is_noted_at_an_attempt():
    world = started(snapshot=snapshot(path="/a")).run()
    noted = world.status.pop("snapshotHash")
    assert world.wait(60).condition("Invalid") == {}
    assert world.end(0, 1).run().status["snapshotHash"] == noted


HIDING = (
    *("/snapshots", "/snapshots//", "//snapshots", "snapshots", "/a/../snapshots/."),
    *("/snapshots/job", "/snapshots/x/../job/"),
)
BESIDE = ("/", "/snap", "/snapshots/jobs", "/snapshots/other", "/a/snapshots", "/snapshots/job/tb")


@pytest.mark.parametrize("path", [*HIDING, *BESIDE])
def test_no_mount_of_the_template_hides_where_snapshots_go(path):
    hides = path in HIDING
    trainer = {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": path}]}
    template = {"spec": {"containers": [trainer]}}
    world = started(template=template, snapshot=snapshot(path="/a"))
    assert world.phase == ("Pending" if hides else "Starting")
    if hides:
        assert "snapshots in /snapshots/job: mount it elsewhere" in str(world.condition("Invalid"))


def move(world: World, looks: int) -> None:
    for _ in range(looks):
        for action in world.plan().actions[:1]:
            world.carry_out(action)


@pytest.mark.parametrize("phase", ["Starting", "Running"])
@pytest.mark.parametrize("looks", range(3))
def test_the_advice_can_be_followed_quicker_than_it_is_stored(phase, looks):
    """suspend, edit, resume: after so many of the operator's moves, none of them or all."""
    world = started() if phase == "Starting" else running()
    move(world.edit(suspend=True), looks)
    move(world.edit(template=OTHER), looks)
    world.patch(suspend=False).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 2)
    assert world.pods["job-0"]["spec"]["containers"][0]["image"] == "other"
    assert world.condition("Invalid").get("status") != "True"
    assert world.status["observedGeneration"] == 4
    assert world.counts[0] == 0
    assert [e.reason for e in world.events][-3:] == ["Suspending", "Resumed", "Running"]


@pytest.mark.parametrize(
    ("field", "value"), [("nprocPerNode", "many"), ("template", {"spec": {"containers": []}})]
)
def test_a_spec_that_no_schema_caught_waits_with_the_field_named(field, value):
    world = started(**{field: value})
    assert (world.phase, world.pods) == ("Pending", {})
    assert f"spec.{field}" in world.condition("Invalid")["message"]
    assert world.plan().actions == ()
    assert world.feedback.confirmed is None  # nothing is asked for either
    mend(world, {field: value}).run()
    assert (world.phase, world.status["attempt"]) == ("Running", 1)


@pytest.mark.fault("U1")
def test_nothing_under_the_template_is_ever_defaulted():
    """A default would change the hash of every template that is stored without it."""

    def defaults(schema: Any, path: str) -> list[str]:
        if not isinstance(schema, dict):
            return []
        found = [path] if "default" in schema else []
        for key in ("properties", "items", "additionalProperties"):
            part = schema.get(key)
            parts = part.items() if key == "properties" and part else [(key, part)]
            found += [bad for name, sub in parts for bad in defaults(sub, f"{path}.{name}")]
        return found

    spec = crd_schema()["properties"]["spec"]
    assert defaults(spec["properties"]["restart"], "restart")  # the search finds them
    assert defaults(spec["properties"]["template"], "template") == []
    assert defaults(spec["properties"]["snapshot"]["properties"]["volume"], "volume") == []


@pytest.mark.fault("U1")
def test_the_hash_of_a_template_is_that_of_every_version():
    """It is stored: another way to work it out would hold up all jobs that an upgrade meets."""
    resources = {"limits": {"cpu": 0.5, "memory": "1Gi"}}
    trainer = {"name": "trainer", "image": "é", "resources": resources}
    template = {"spec": {"nodeSelector": {}, "containers": [trainer]}, "metadata": None}
    assert compact_spec.template(template).packed.digest == "19ae1bda7edf822a"
    assert compact_spec.volume({"nfs": {"server": "é", "path": "/a"}}).digest == "7fda66c907117fff"
