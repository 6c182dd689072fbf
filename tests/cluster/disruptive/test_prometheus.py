"""A real Prometheus reads operator and trainers by the chart's own monitors, and alerts fire."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import binaries
from support import prometheus
from support.chart import CHART, panels
from support.cluster import wait_for
from support.prometheus import Prometheus
from support.site import SYSTEM, Site, digits, job

pytestmark = pytest.mark.tier("all")

GPU = "nvidia.com/gpu"
#: What takes minutes or hours is to take seconds here; the conditions themselves stay.
SHORTENED = {
    "> 900": "> 8",
    "> 7200": "> 12",
    "for: 1m\n": "for: 0s\n",
    "for: 2m\n": "for: 1s\n",
    "for: 30m\n": "for: 3s\n",
    ">= 5": ">= 2",
}

#: A script that reports by the library, and one that only prints.
LIBRARY = """
import time, torch, ddpjob_trainer as ddp
run = ddp.start(total_steps=10**6, global_batch=1, seed=1)
model = torch.nn.Linear(1, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps([(torch.ones(1), torch.ones(1))] * 8):
    for x, y in step.batches:
        step.backward(((model(x) - y) ** 2).mean())
    time.sleep(0.1)
    step.commit()
    run.log({"accuracy": 0.98})
"""
PLAIN = """
import time
for step in range(10**6):
    time.sleep(0.1)
    print(f"step {step} loss 0.2, right: 0.75", flush=True)
"""


@pytest.fixture(scope="module")
def monitors() -> list[dict[str, Any]]:
    helm = binaries.ensure(["helm"], print)["helm"]
    on = "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true"
    done = subprocess.run(
        [helm, "template", "ddpjob", CHART, "-n", SYSTEM, "--set", on],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [body for body in yaml.safe_load_all(done.stdout) if body]
    return [body for body in found if body["kind"] in ("ServiceMonitor", "PodMonitor")]


@pytest.fixture(scope="module")
def watch(
    site: Site, monitors: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    rules = (CHART / "files" / "alerts.yaml").read_text()
    for long, short in SHORTENED.items():
        assert long in rules, long
        rules = rules.replace(long, short)
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with prometheus.running(site.cluster.kubeconfig, monitors, rules, folder) as found:
        yield found


def wait_firing(watch: Prometheus, name: str, **labels: str) -> None:
    wait_for(
        lambda: labels.items() <= watch.firing().get(name, {"": ""}).items(),
        f"{name} {labels} to fire among {watch.firing()}",
    )


def wait_resolved(watch: Prometheus, name: str) -> None:
    wait_for(lambda: name not in watch.firing(), f"{name} to be over")


def wait_told(watch: Prometheus, expression: str, what: str) -> None:
    """Wait until a sum over both operators is 1; a page that comes late is in no sum."""
    both = f"{expression} and on() count(ddpjob_leader) == 2"
    wait_for(lambda: [one["value"][1] for one in watch.query(both)] == ["1"], what)


def test_everything_is_found_alerts_fire_and_every_panel_has_data(site, watch):
    wait_told(watch, "sum(ddpjob_leader)", "two operators of which one leads")
    site.apply(digits("watched", steps=100_000, step_seconds=0.1, every=20))
    site.wait_running("watched", 1, step=25)
    here = f'namespace="{site.namespace}",ddpjob="watched"'
    wait_for(
        lambda: len(watch.query(f"ddpjob_trainer_step{{{here}}} > 20")) == 3, "a step of each rank"
    )
    jobs = f'sum(ddpjob_jobs{{namespace="{site.namespace}",phase="Running"}})'
    wait_told(watch, jobs, "the job to be told by the leader alone")

    # No progress, and snapshots that grow old: one rank stands still, so all do.
    site.kill_training("watched-1", signal="STOP")
    wait_firing(watch, "DDPJobNoProgress", namespace=site.namespace, ddpjob="watched")
    wait_firing(watch, "DDPJobSnapshotTooOld", namespace=site.namespace, ddpjob="watched")
    site.kill_training("watched-1", signal="CONT")
    wait_resolved(watch, "DDPJobNoProgress")

    # A restart loop, and its end.
    backoff = {"initialSeconds": 1, "maxSeconds": 1}
    body = job("looping", ["sh", "-c", "exit 3"], restart={"maxRestarts": 3, "backoff": backoff})
    give_gpus(site)
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {GPU: 1}}
    site.apply(body)
    wait_firing(watch, "DDPJobRestartLoop", namespace=site.namespace)
    site.wait_phase("looping", "Failed")
    wait_firing(watch, "DDPJobFailed", namespace=site.namespace)

    for name, script, value in (("library", LIBRARY, "0.98"), ("plain", PLAIN, "0.75")):
        (site.volume() / f"{name}.py").write_text(script)
        site.apply(prints(name))
        labels = f'namespace="{site.namespace}",ddpjob="{name}",name="accuracy"'
        asked = f"ddpjob_trainer_value{{{labels}}} == {value}"
        wait_for(lambda asked=asked: watch.query(asked), asked)
    check_panels(site, watch)

    # Nobody leads.
    scale = ("-n", SYSTEM, "scale", "deployment/ddpjob-operator")
    site.cluster.kubectl(*scale, "--replicas=0", check=True)
    wait_firing(watch, "DDPJobOperatorDown")
    site.cluster.kubectl(*scale, "--replicas=2", check=True)
    wait_resolved(watch, "DDPJobOperatorDown")
    for name in ("watched", "looping", "library", "plain"):
        site.delete(name)


def prints(name: str) -> dict[str, Any]:
    """Return a job of one process that runs ``name``.py from the claim."""
    body = digits(name, replicas=1, output={"metrics": {"accuracy": "right: ([0-9.]+)"}})
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["ddpjob-trainer", "run", f"/snapshots/{name}.py"]
    return body


def give_gpus(site: Site) -> None:
    """Let the nodes say that they have GPUs, which they have not: a resource is only a number."""
    room = json.dumps({"status": {"capacity": {GPU: "3"}, "allocatable": {GPU: "3"}}})
    for node in ("node1", "node2"):
        patch = ("patch", "node", node, "--subresource=status", "--type=merge", "-p", room)
        site.cluster.kubectl(*patch, check=True)


def check_panels(site: Site, watch: Prometheus) -> None:
    """Every query of the dashboard returns something, as Grafana would ask it."""
    asked = 0
    values = {"$namespace": site.namespace, "$ddpjob": ".*", "$value": ".*"}
    values["$__rate_interval"] = "1m"
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            what = f"{panel['title']}: data for {expression}"
            # Samples per second come with a line of progress, now and then.
            wait_for(lambda asked=expression: watch.query(asked), what)
            asked += 1
    assert asked > 15
