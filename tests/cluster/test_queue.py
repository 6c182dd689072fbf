"""DDPJobs in queues of a real Kueue: admission, borrowing, preemption, its own restart."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster import ROOT, wait_for
from support.patience import PATIENCE
from support.sharing import Shared
from support.site import STEPS, Site, digits, trainer

pytestmark = [pytest.mark.root, pytest.mark.tier("all")]

PAGE = ROOT / "docs" / "guides" / "kueue.md"
API = "kueue.x-k8s.io/v1beta2"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
#: Of one gang of three.
SHARE = "30m"


def queued(name: str, queue: str, *, priority: str = "", **more: Any) -> dict[str, Any]:
    """A gang whose pods ask for a third of SHARE each."""
    body = digits(name, steps=STEPS, slow=1, every=5, **more)
    labels = {QUEUE: queue, **({PRIORITY: priority} if priority else {})}
    body["metadata"]["labels"] = labels
    trainer(body)["resources"] = {"requests": {"cpu": "10m"}}
    return body


@pytest.fixture
def made(site: Site, shared: Shared) -> Iterator[Callable[..., None]]:
    """Make objects of Kueue, which go after the test, the newest first."""
    shared.once(f"kueue-{site.cluster.name}", site.cluster.install_kueue)
    objects: list[dict[str, Any]] = []

    def make(*more: dict[str, Any]) -> None:
        site.apply(*more)
        objects.extend(more)

    yield make
    for one in reversed(objects):
        site.kubectl("delete", one["kind"], one["metadata"]["name"], "--wait=false", check=True)


def queue(site: Site, name: str, **spec: Any) -> list[dict[str, Any]]:
    """A queue of that name with the quota of one gang; ``spec``: more of its ClusterQueue."""
    whole = {"name": f"{name}-{site.namespace}"}
    flavors = [{**whole, "resources": [{"name": "cpu", "nominalQuota": SHARE}]}]
    group = {"coveredResources": ["cpu"], "flavors": flavors}
    queue = {"namespaceSelector": {}, "resourceGroups": [group], **spec}
    local = {"name": name, "namespace": site.namespace}
    return [
        {"apiVersion": API, "kind": kind, "metadata": metadata, "spec": body}
        for kind, metadata, body in (
            ("ResourceFlavor", whole, {"nodeLabels": {}}),
            ("ClusterQueue", whole, queue),
            ("LocalQueue", local, {"clusterQueue": whole["name"]}),
        )
    ]


def priority(site: Site, value: int) -> dict[str, Any]:
    meta = {"name": f"p{value}-{site.namespace}"}
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": meta,
            "value": value}  # fmt: skip


def waits(site: Site, name: str, words: str) -> None:
    """Wait until the job says so, without a pod."""
    said = lambda: words in site.condition(name, "Stalled").get("message", "")  # noqa: E731
    site.wait(name, said, f"{name} to say {words}")
    assert site.status(name)["phase"] == "Pending"
    wait_for(lambda: not site.pods(name), f"the pods of {name} to go")


def workload(site: Site, name: str) -> dict[str, Any]:
    found = site.get("workloads", "-l", f"ddpjob.dev/job-name={name}")["items"]
    return dict(found[0]) if found else {}


def true(site: Site, name: str, type_: str) -> bool:
    told = workload(site, name).get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) == (type_, "True") for one in told)


@pytest.mark.fault("U19")
def test_a_preempted_gang_comes_back_and_ends_in_the_same_bits(site, finished, made):
    """Its agreed snapshot is the step that it goes on from; Kueue is told when it has ended."""
    high = priority(site, 100)
    lower = {"preemption": {"withinClusterQueue": "LowerPriority"}}
    made(high, *queue(site, "preempted", **lower))
    site.apply(queued("low", "preempted"))
    site.wait_running("low", 1, snapshot_after=0)
    assert true(site, "low", "PodsReady") or site.wait(
        "low", lambda: true(site, "low", "PodsReady"), "PodsReady"
    )
    site.apply(queued("high", "preempted", priority=high["metadata"]["name"]))
    site.wait_running("high", 1)
    waits(site, "low", "insufficient")
    left = site.status("low")
    assert left["restarts"]["total"] == 0, "nothing is charged"
    site.delete("high")
    status = site.wait_running("low", 2)
    assert status["restarts"]["disruptions"] == 0
    finished("low")
    site.resumed_from("low", at_least=left["progress"]["snapshotStep"])
    site.wait("low", lambda: true(site, "low", "Finished"), "the Workload to be finished")
    site.delete("low")


def test_a_queue_lends_its_quota_and_takes_it_back(site, made):
    cohort = {"cohortName": f"c-{site.namespace}"}
    takes_back = {"preemption": {"reclaimWithinCohort": "Any"}}
    made(*queue(site, "borrows", **cohort), *queue(site, "lends", **cohort, **takes_back))
    # They are one flavour's, or nothing could be borrowed.
    flavor = f"borrows-{site.namespace}"
    path = "/spec/resourceGroups/0/flavors/0/name"
    change = f'[{{"op": "replace", "path": "{path}", "value": "{flavor}"}}]'
    lender = f"lends-{site.namespace}"
    site.kubectl("patch", "clusterqueue", lender, "--type=json", "-p", change, check=True)
    for name in ("first", "second"):
        site.apply(queued(name, "borrows"))
        site.wait_running(name, 1)
    site.apply(queued("owner", "lends"))
    site.wait_running("owner", 1)
    waiting = lambda: [n for n in ("first", "second") if not site.pods(n)]  # noqa: E731
    (evicted,) = wait_for(waiting, "a gang to give back what it borrowed")
    waits(site, evicted, "insufficient")
    site.delete("owner")
    site.wait_running(evicted, 2)
    for name in ("first", "second"):
        site.delete(name)


def test_kueue_starts_again_while_one_gang_runs_and_one_waits(site, made):
    made(*queue(site, "restarted"))
    site.apply(queued("runs", "restarted"))
    site.wait_running("runs", 1)
    site.apply(queued("waits", "restarted"))
    waits(site, "waits", "insufficient")
    before = site.uids("runs")
    kubectl = site.cluster.kubectl
    manager = ("-n", "kueue-system", "deployment/kueue-controller-manager")
    kubectl("rollout", "restart", *manager, check=True)
    kubectl("rollout", "status", *manager, check=True)
    assert site.uids("runs") == before
    site.delete("runs")
    site.wait_running("waits", 1)
    site.delete("waits")


def test_the_page_as_it_is_read(site, made, tmp_path):
    """Its objects and its commands, in their order; names of the whole cluster are the test's."""
    text = PAGE.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (objects,) = [body for _, body in blocks if "ClusterQueue" in body]
    named = re.sub(
        r"(any-node|name: team|clusterQueue: team|urgent)", rf"\1-{site.namespace}", objects
    )
    found = [one for one in yaml.safe_load_all(named) if one]
    for one in found:
        if one["kind"] == "LocalQueue":
            one["metadata"]["name"] = "team"
    made(*found)
    commands = [body for kind, body in blocks if not kind and "helm" not in body]
    run(site, tmp_path, commands[0])
    site.wait_running("digits", 1)
    assert "digits" in run(site, tmp_path, commands[1])
    waiting = commands[2].splitlines()
    run(site, tmp_path, "\n".join(waiting[:-1]))
    waits(site, "digits", "spec.active")
    run(site, tmp_path, "\n".join((waiting[0], waiting[-1])))
    site.wait_running("digits", 2)
    site.delete("digits")
    site.kubectl("delete", "pvc", "digits-snapshots", "--wait=false", check=True)


def run(site: Site, folder: Path, command: str) -> str:
    """As a reader does who has set his kubeconfig's namespace."""
    config = folder / "kubeconfig"
    if not config.exists():
        config.write_text(site.kubectl("config", "view", "--raw", check=True).stdout)
        site.cluster.kubectl(
            "config", "set-context", "--current", f"--namespace={site.namespace}",
            f"--kubeconfig={config}", check=True,
        )  # fmt: skip
    path = f"{site.cluster.kubectl_path.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=PATIENCE, env={**os.environ, "PATH": path, "KUBECONFIG": str(config)},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
