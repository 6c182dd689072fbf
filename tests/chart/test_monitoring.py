"""What Prometheus and Grafana get from the chart: it must name what is really there."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import start_http_server, values

from ddpjob_operator.core import render
from ddpjob_operator.core.actions import Measurement
from ddpjob_operator.core.objects import observe, spec
from ddpjob_operator.shell.telemetry import Metrics
from ddpjob_trainer.launcher.reports import endpoints
from ddpjob_trainer.launcher.reports.endpoints import LauncherMetrics
from ddpjob_trainer.telemetry import metrics
from devcluster import host
from support import prometheus
from support.chart import CHART, panels
from support.cluster import ROOT, wait_for
from support.prometheus import scrape_config
from support.world import job_object

FILES = CHART / "files"
TESTS = ROOT / "tests" / "chart" / "alerts_test.yaml"
RUNBOOKS = ROOT / "docs" / "reference" / "runbooks.md"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
#: A metric of ours, and nothing else: such names stand in expressions only.
NAME = re.compile(r"\bddpjob_[a-z_]+")


@pytest.fixture(scope="module", autouse=True)
def promtool() -> None:
    host.ensure_packages({"promtool": "prometheus"}, print)


def alerts() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        yield from group["rules"]


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names of all series that operator and trainers serve."""
    of_operator = Metrics()
    of_operator.expose_jobs(list)
    of_operator.expose_watch_ages({})
    found = set()
    for one in (*metrics.WORKER, *metrics.LAUNCHER):
        found |= {one.exposed, *(f"{one.full_name}_bucket" for _ in one.buckets)}
    for family in of_operator.registry.collect():
        ends = {"counter": "_total", "histogram": "_bucket", "info": "_info"}
        found.add(family.name + ends.get(family.type, ""))
    return found


def test_the_alerts_fire_when_they_should_and_not_else():
    for command in (("check", "rules", FILES / "alerts.yaml"), ("test", "rules", TESTS)):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def page(tmp_path: Path) -> dict[str, Any]:
    """The configuration on the page. Debian's Prometheus is built without that discovery."""
    (text,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", METRICS.read_text(), re.DOTALL)
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    found: dict[str, Any] = yaml.safe_load(text)
    for job in found["scrape_configs"]:
        (discovery,) = job.pop("kubernetes_sd_configs")
        assert discovery["role"] == "pod"
    return found


@dataclass
class Site:
    """An operator in ddpjob-system, and one trainer pod of job `job` in namespace `team`."""

    operator: Metrics
    rank: metrics.Metrics
    launcher: LauncherMetrics = field(default_factory=LauncherMetrics)
    status: dict[str, str] = field(default_factory=lambda: {"phase": "Running"})
    age: float = 0.0

    def jobs(self) -> list[observe.Job]:
        job = {**JOB, "status": self.status}
        return [observe.job(job)] if self.operator.leader.collect()[0].samples[0].value else []

    def count(self, name: str, label: str, value: float) -> None:
        self.operator.record("team", [Measurement(name, value, label)])

    def stamp(self, name: str, age: float) -> None:
        self.rank.set(f"{name}_timestamp_seconds", time.time() - age)


JOB = job_object()
JOB["metadata"]["namespace"] = "team"
#: What makes each alert fire, by the objects that operator and trainer themselves report with.
TROUBLE: dict[str, Callable[[Site], object]] = {
    "DDPJobOperatorBlind": lambda site: setattr(site, "age", 301.0),
    "DDPJobStalled": lambda site: site.status.update(phase="Pending", reason="Unschedulable"),
    "DDPJobRestartLoop": lambda site: site.count("restarts_total", "User", 5),
    "DDPJobRoundLoop": lambda site: site.count("rounds_total", "Killed", 10),
    "DDPJobFailed": lambda site: site.count("finished_total", "Failed", 1),
    "DDPJobLowGoodput": lambda site: site.count("pod_seconds_total", "recovering", 4000),
    "DDPJobNoProgress": lambda site: site.stamp("heartbeat", 901),
    "DDPJobSilent": lambda site: setattr(site.launcher, "silent_seconds", 1801.0),
    "DDPJobSnapshotTooOld": lambda site: site.stamp("snapshot", 7201),
    "DDPJobSnapshotsFail": lambda site: site.rank.add("snapshot_failures", 2),
    # The last: only who leads speaks of jobs.
    "DDPJobOperatorDown": lambda site: site.operator.leader.set(0),
}
#: These are about the operator, all others about the jobs of a namespace.
OF_OPERATOR = {"DDPJobOperatorDown": None, "DDPJobOperatorBlind": "ddpjob-system"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)  # the rank's sets it
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "ranks"))
    (tmp_path / "ranks").mkdir()
    operator = Metrics()
    found = Site(operator, metrics.Metrics(0))
    operator.leader.set(1)
    operator.expose_jobs(found.jobs)
    operator.expose_watch_ages({"pods": lambda: found.age})
    found.stamp("heartbeat", 0)
    found.stamp("snapshot", 0)
    found.rank.flush()
    return found


def discovered(pod: dict[str, Any], namespace: str, name: str, address: str) -> dict[str, Any]:
    """A target as the discovery in Kubernetes makes it of a pod."""
    (port,) = (one for c in pod["spec"]["containers"] for one in c.get("ports", []))
    labels = {"namespace": namespace, "pod_name": name, "pod_container_port_name": port["name"]}
    for label, value in pod["metadata"]["labels"].items():
        known = re.sub(r"[^a-zA-Z0-9]", "_", label)
        labels |= {f"pod_label_{known}": value, f"pod_labelpresent_{known}": "true"}
    meta = {f"__meta_kubernetes_{label}": value for label, value in labels.items()}
    return {"targets": [address], "labels": meta}


def test_each_alert_fires_in_a_plain_prometheus_and_names_the_namespace(
    template, page, site, tmp_path
):
    """By the page's own configuration; only addresses, intervals and `for:` are others."""
    rules = yaml.safe_load((FILES / "alerts.yaml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule.update({"for": "1s"} if "for" in rule else {})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    seconds = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    page |= {"rule_files": ["rules.yaml"], "global": dict.fromkeys(seconds, "1s")}
    operators, trainers = page["scrape_configs"]
    deployment = template("-n", "ddpjob-system")["Deployment/ddpjob-system/ddpjob-operator"]
    of_job = render.pod(observe.job(JOB), spec.parse(JOB["spec"]), 1, 2)
    served, _ = start_http_server(0, "127.0.0.1", site.operator.registry)
    launcher = endpoints.serve(0, tmp_path / "ranks", site.launcher, dict, lambda: True)
    with contextlib.ExitStack() as stack:
        stack.callback(served.shutdown)
        stack.callback(launcher.end)
        at, elsewhere = (f"127.0.0.1:{one.server_port}" for one in (served, launcher))
        pod = deployment["spec"]["template"]
        stranger = {**of_job, "metadata": {"labels": {"app": "another"}}}
        # Each job is shown all pods, as by the API server: it keeps its own.
        operators["static_configs"] = trainers["static_configs"] = [
            discovered(pod, "ddpjob-system", "operator-x", at),
            discovered(of_job, "team", "job-2", elsewhere),
            discovered(stranger, "another", "stranger", elsewhere),
        ]
        found = stack.enter_context(prometheus.started(page, tmp_path))
        wait_for(lambda: found.query("ddpjob_trainer_workers"), "a scrape of the trainer")
        wait_for(lambda: found.query("ddpjob_finished_total"), "two scrapes of the operator")
        up = {(one["metric"]["namespace"], one["metric"]["pod"]) for one in found.query("up")}
        assert up == {("ddpjob-system", "operator-x"), ("team", "job-2")}
        wanted = {one["alert"]: OF_OPERATOR.get(one["alert"], "team") for one in alerts()}
        assert TROUBLE.keys() == wanted.keys(), "each alert needs a case"
        wait_for(lambda: not found.firing(), "nothing to fire: before the scrape nobody leads")
        fired = {}
        *names, last = TROUBLE
        for some in (names, [last]):
            for name in some:
                TROUBLE[name](site)
            site.rank.flush()
            for name in some:
                labels = wait_for(lambda: found.firing().get(name), name)  # noqa: B023
                fired[name] = labels.get("namespace")
        assert fired == wanted


def test_every_alert_is_tested_both_ways_and_has_its_runbook():
    fired, silent = set(), set()
    for story in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in story["alert_rule_test"]:
            (fired if case.get("exp_alerts") else silent).add(case["alertname"])
    assert fired == silent == {alert["alert"] for alert in alerts()}
    headings = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        place = f"docs/reference/runbooks.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook"] == place


def test_alerts_and_panels_ask_for_what_is_served(known):
    asked = [alert["expr"] for alert in alerts()]
    asked += [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(asked) > 20
    for expr in asked:
        names = set(NAME.findall(expr))
        assert names, expr
        assert names <= known, expr


def test_rules_and_dashboard_come_whole(template):
    on = template("--set", "metrics.prometheusRule.enabled=true,metrics.dashboard.enabled=true")
    rule = on["PrometheusRule/ddpjob-operator"]["spec"]
    assert rule == yaml.safe_load((FILES / "alerts.yaml").read_text())
    page = "https://docs.example/ddpjob/runbooks.md"
    linked = template(
        "--set", f"metrics.prometheusRule.enabled=true,metrics.prometheusRule.runbookUrl={page}"
    )["PrometheusRule/ddpjob-operator"]["spec"]
    for one in (alert for group in linked["groups"] for alert in group["rules"]):
        assert one["annotations"]["runbook_url"] == f"{page}#{one['alert'].lower()}"
        assert "runbook" not in one["annotations"]
    board = on["ConfigMap/ddpjob-operator-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    text = (FILES / "dashboard.json").read_text()
    assert json.loads(board["data"]["ddpjob.json"]) == json.loads(text)


def test_the_pod_monitor_finds_the_pods_that_the_operator_makes(template):
    on = ("--set", "metrics.podMonitor.enabled=true,metrics.podMonitor.labels.team=a")
    monitor = template(*on)["PodMonitor/ddpjob-operator-trainers"]
    assert monitor["metadata"]["labels"]["team"] == "a"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    served = template(*on, "--set", "namespaces={a,b}")["PodMonitor/ddpjob-operator-trainers"]
    assert served["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    obj = job_object()
    pod = render.pod(observe.job(obj), spec.parse(obj["spec"]), 1, 2)
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression["key"] in pod["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = [port for c in pod["spec"]["containers"] for port in c.get("ports", [])]
    assert [p["containerPort"] for p in ports if p["name"] == endpoint["port"]] == [9400]
    labels = {re.sub(r"[^a-zA-Z0-9]", "_", name) for name in pod["metadata"]["labels"]}
    for rule in endpoint["relabelings"]:
        (source,) = rule["sourceLabels"]
        assert source.removeprefix("__meta_kubernetes_pod_label_") in labels


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_no_page_floods_prometheus(template, tmp_path, kind):
    """The whole page is bounded, and each name; by limits that a Prometheus takes."""
    objects = template("--set", f"metrics.{kind}.enabled=true")
    (monitor,) = (one for name, one in objects.items() if name.lower().startswith(kind.lower()))
    config = scrape_config(monitor, "30s")
    limits = {name: value for name, value in config.items() if name.endswith("_limit")}
    bounded = {"body_size_limit", "label_limit", "label_name_length_limit"}
    bounded |= {"label_value_length_limit"} | ({"sample_limit"} if kind == "podMonitor" else set())
    assert {name for name, value in limits.items() if value} == bounded
    text = yaml.safe_dump({"scrape_configs": [{"job_name": "x", **limits}]})
    (tmp_path / "prometheus.yaml").write_text(text)
    command = ["promtool", "check", "config", tmp_path / "prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_service_monitor_finds_the_operators_service(template, helm):
    on = ("--set", "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.labels.team=a")
    objects = template(*on)
    monitor = objects["ServiceMonitor/ddpjob-operator"]
    assert monitor["metadata"]["labels"]["team"] == "a"
    service = objects["Service/ddpjob-operator-metrics"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    done = helm("template", str(CHART), *on, "--set", "metrics.service.enabled=false")
    assert "needs metrics.service.enabled" in done.stderr
