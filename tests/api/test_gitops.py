"""What deployment tools see of a job: its health in each phase, and that nothing drifts."""

import pytest

from support.arena import Arena
from support.gitops import argo_health, kstatus
from support.manifest import EXAMPLES
from support.patience import WITHIN
from support.rest import Object, eventually

pytestmark = pytest.mark.tier("all")


def health(arena: Arena, name: str) -> tuple[str, str]:
    obj = arena.rest.get(arena.job_path(name))
    return kstatus(obj), argo_health(obj)[0]


def test_each_phase_is_what_tools_take_it_for(control_plane, arena):
    arena.apply("gang")
    assert health(arena, "gang") == ("InProgress", "Progressing"), "no operator has seen it"
    arena.apply("fails", replicas=1, restart={"maxRestarts": 0})
    arena.apply("waits", replicas=1)
    conflict = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "waits"}}
    arena.rest.post(arena.path("services"), {**conflict, "spec": {"ports": [{"port": 1}]}})
    arena.start_operator()
    arena.wait_phase("gang", "Running")
    assert health(arena, "gang") == ("Current", "Healthy")
    ready = ("wait", "--for=condition=Ready", "ddpjob/gang", WITHIN)
    control_plane.kubectl("-n", arena.namespace, *ready, check=True)
    arena.rest.merge(arena.job_path("gang"), {"spec": {"suspend": True}})
    arena.wait_phase("gang", "Suspended")
    suspended = ("InProgress", "Suspended")
    eventually("its pods have ended", lambda: health(arena, "gang") == suspended)
    arena.rest.merge(arena.job_path("gang"), {"spec": {"suspend": False}})
    arena.wait_phase("gang", "Running")
    assert health(arena, "gang") == ("Current", "Healthy")
    arena.succeed("gang")
    assert health(arena, "gang") == ("Current", "Healthy")

    arena.wait_phase("fails", "Running")
    arena.kubelet.finish("fails-0", 1)
    arena.wait_phase("fails", "Failed")
    obj = arena.rest.get(arena.job_path("fails"))
    assert kstatus(obj) == "Failed"
    assert argo_health(obj)[0] == "Degraded"
    assert argo_health(obj)[1].startswith("MaxRestartsExceeded: maxRestarts 0 is used up")

    arena.wait_status("waits", "it is stalled", lambda s: s.get("reason") == "NameConflict")
    obj = arena.rest.get(arena.job_path("waits"))
    assert kstatus(obj) == "Failed", "docs/guides/gitops.md says so"
    assert argo_health(obj)[0] == "Progressing", "it is tried again"
    assert argo_health(obj)[1].startswith("NameConflict: Service waits exists")


@pytest.mark.parametrize("how", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_nothing_drifts(control_plane, arena, how):
    """The operator has written its status, the API server its defaults: applied again as it is."""

    def kubectl(*words: str) -> str:
        command = ("-n", arena.namespace, *words, "-R", "-f", str(EXAMPLES))
        return control_plane.kubectl(*command, check=True).stdout

    def settled() -> list[Object] | None:
        """As they are once the operator has no more to say."""
        jobs: list[Object] = arena.rest.get(arena.job_path())["items"]
        seen = all(kstatus(job) == "Current" for job in jobs)
        return jobs if seen else None

    arena.start_operator()
    kubectl("apply", *how)
    before = eventually("all examples run", settled)
    assert len(before) > 5
    assert kubectl("diff", *how) == ""
    kubectl("apply", *how)
    after = arena.rest.get(arena.job_path())["items"]
    assert [applied(job) for job in after] == [applied(job) for job in before]


def applied(job: Object) -> Object:
    """All of a job that is not the operator's."""
    metadata = {k: v for k, v in job["metadata"].items() if k != "resourceVersion"}
    fields = [f for f in metadata["managedFields"] if f.get("subresource") != "status"]
    return {"metadata": {**metadata, "managedFields": fields}, "spec": job["spec"]}
