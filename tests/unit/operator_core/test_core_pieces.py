"""Tables for the pure pieces: parsing of what strangers wrote, rendering."""

import json
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_contract import crd
from ddpjob_operator.core.objects import observe, spec, status
from support.world import START, env_of, rendered, running


@pytest.mark.parametrize(
    ("raw", "loss"),
    [({"loss": 1}, 1.0), ({"loss": 0.0007893476}, 0.000789348),
      ({"loss": float("nan")}, None), ({"loss": 10**400}, None),
     ({"loss": "1"}, None), ({"loss": True}, None)],
)  # fmt: skip
def test_progress_of_a_stranger(raw, loss):
    found = observe.progress(raw, START)
    assert found.loss == loss


def test_status_survives_a_round_trip():
    world = running(suspend=False).end(1, 137)
    assert status.to_dict(status.from_dict(world.status)) == world.status


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
def test_nproc_per_node(nproc, limits, expected):
    template = {"spec": {"containers": [{"name": "t", "resources": {"limits": limits}}]}}
    found = spec.parse({"nprocPerNode": nproc, "template": template, "replicas": 2})
    assert found.nproc_per_node == expected


@pytest.mark.parametrize(
    ("nproc", "limits", "says"),
    [
        (8, {"nvidia.com/gpu": "4"}, r"8, but the limit nvidia\.com/gpu .* is 4,"),
        ("2", {"amd.com/gpu": 1}, r"2, but the limit amd\.com/gpu .* is 1,"),
        *[("auto", {"nvidia.com/gpu": 0, "amd.com/gpu": odd},
           r"auto, .* amd\.com/gpu .* plain number, or set nprocPerNode") for odd in
          ("8.0", "8e0", "8000m", "+8", "0.008k", 8.0, "9" * 5000)],
    ],
)  # fmt: skip
def test_gpus_that_do_not_fit_or_are_spelt_otherwise_are_refused(nproc, limits, says):
    template = {"spec": {"containers": [{"name": "t", "resources": {"limits": limits}}]}}
    with pytest.raises(spec.SpecError, match=rf"spec\.nprocPerNode is {says}"):
        spec.parse({"nprocPerNode": nproc, "template": template, "replicas": 2})


@pytest.mark.parametrize("every", [0, -1, 10**9 + 1, "50", "auto", "", True, 1.5, [50], {}])
def test_steps_between_snapshots_that_are_no_number_are_refused(every):
    """As the CRD does: an older one let them pass, and Auto is not what they say."""
    template = {"spec": {"containers": [{"name": "t"}]}}
    raw = {"template": template, "snapshot": {"volume": {"emptyDir": {}}, "everySteps": every}}
    with pytest.raises(spec.SpecError, match=r"everySteps: must be Auto or a number from 1 to 1"):
        spec.parse(raw)


def render_pod(template: dict[str, Any], **more: Any) -> dict[str, Any]:
    return rendered(attempt=3, replica=1, template=template, **more)


def test_the_environment_of_the_contract():
    template = {"spec": {"containers": [{"name": "trainer", "env": [{"name": "A", "value": "b"}]}]}}
    body = render_pod(
        template, nprocPerNode=1, snapshot={"path": "/s/", "volume": {"emptyDir": {}}}
    )
    env = env_of(body)
    assert env["MASTER_ADDR"] == env["PET_MASTER_ADDR"] == "job-0.job.ns.svc"
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "3", "0")
    assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_RDZV_ID"]) == (
        "3", "1", "uid-of-job-3")  # fmt: skip
    assert (env[contract.ATTEMPT], env[contract.REPLICA]) == ("3", "1")
    assert env["DDPJOB_UID"] == "uid-of-job"
    assert env[contract.SNAPSHOT_DIR] == "/s/job"
    assert body["spec"]["containers"][0]["env"][-1] == {"name": "A", "value": "b"}
    reserved = set(contract.RESERVED_ENV)
    ours = {name for name in env if name != "A" and name != "PYTHONUNBUFFERED"}
    assert all(name in reserved or name.startswith(contract.OWN_PREFIX) for name in ours)


def test_init_containers_have_the_rendezvous_variables_and_no_secret():
    """A check of the gang before training, as NVSentinel's, reads them."""
    mine = {"name": "A", "value": "$(RANK)"}
    inits = [{"name": "check", "env": [mine]}, {"name": "proxy", "restartPolicy": "Always"}]
    body = render_pod({"spec": {"containers": [{"name": "t"}], "initContainers": inits}})
    for init in body["spec"]["initContainers"]:
        env = {one["name"]: one["value"] for one in init["env"]}
        assert env.pop("A", mine["value"]) == mine["value"]
        assert env == {k: v for k, v in env_of(body).items() if k in contract.RESERVED_ENV}
        assert env.keys() == set(contract.RESERVED_ENV)


def test_labels_that_a_chart_sets_for_a_release_stay_and_so_do_ours():
    """Its Service and its spread constraints select by them."""
    given = {f"app.kubernetes.io/{name}": "x" for name in ("name", "instance", "managed-by")}
    wrong = {crd.LABEL_JOB_UID: "x", crd.LABEL_JOB_NAME: "x", crd.LABEL_ATTEMPT: "x"}
    template = {"spec": {"containers": [{"name": "t"}]}}
    plain = render_pod(template)["metadata"]["labels"]
    assert given.keys() < plain.keys()
    labels = render_pod({**template, "metadata": {"labels": {**given, **wrong}}})["metadata"]
    assert labels["labels"] == {**plain, **given}


def test_ranks_are_left_to_the_launcher_with_several_processes_per_pod():
    body = render_pod({"spec": {"containers": [{"name": "t"}]}}, nprocPerNode=2)
    assert not env_of(body).keys() & set(contract.PROCESS_ENV)


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


@pytest.mark.parametrize(("given", "grace"), [({}, 30), (0, 1), (-5, 1), (600, 600), ("x", 30)])
def test_a_pod_is_there_for_as_long_as_its_containers_may_run(given, grace):
    """Without a grace period its object goes first, and the barrier would see nothing."""
    body = {"containers": [{"name": "t"}]}
    more = {} if given == {} else {"terminationGracePeriodSeconds": given}
    found = render_pod({"spec": {**body, **more}})
    assert found["spec"]["terminationGracePeriodSeconds"] == grace
    assert env_of(found)[contract.GRACE_SECONDS] == str(grace)


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
def test_the_metrics_port_is_declared_unless_the_template_has_one(given, expected):
    container = {"name": "trainer", "image": "i", **({"ports": given} if given else {})}
    body = rendered(template={"spec": {"containers": [container]}})
    assert body["spec"]["containers"][0]["ports"] == expected
