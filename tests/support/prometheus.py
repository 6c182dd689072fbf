"""A real Prometheus on this machine, which reads what the chart's monitors mean.

The Prometheus operator turns a ServiceMonitor or a PodMonitor into a scrape configuration; here it
is done by hand for the few fields that ours have, so that a wrong selector or port finds nothing.
Debian's Prometheus is built without discovery in Kubernetes: a thread of ours lists pods and
endpoints instead and gives it all of them, with the labels that its own discovery would give.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import subprocess
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from devcluster import host
from support.cluster import wait_for
from support.patience import PATIENCE
from support.rest import Object, Rest, RestError

_META = "__meta_kubernetes"


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Its HTTP API."""

    port: int

    def ready(self) -> bool:
        """Whether it takes queries: it listens before it does."""
        return self._get("/-/ready")[0] == 200

    def ask(self, path: str, **parameters: str) -> Any:
        """GET /api/v1/PATH -> data. OSError while it does not answer."""
        _, text = self._get(f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        body = json.loads(text)
        assert body["status"] == "success", body
        return body["data"]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def query(self, expression: str) -> list[Object]:
        """The series of an instant query."""
        return list(self.ask("query", query=expression)["result"])

    def firing(self) -> dict[str, Object]:
        """Labels of alerts that fire now, by name."""
        alerts = self.ask("alerts")["alerts"]
        return {a["labels"]["alertname"]: a["labels"] for a in alerts if a["state"] == "firing"}


@contextmanager
def running(
    kubeconfig: Path, monitors: list[Object], rules: str, folder: Path, every: str = "1s"
) -> Iterator[Prometheus]:
    """Prometheus with these monitors and alert rules; gone at the end."""
    host.ensure_packages({"prometheus": "prometheus"}, print)
    (folder / "rules.yaml").write_text(rules)
    configuration = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [scrape_config(one, every) for one in monitors],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    # The log tells the port: it takes a free one.
    command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    command.append("--web.listen-address=127.0.0.1:0")
    with (
        _discovery(Rest(kubeconfig), folder),
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT) as process,
    ):

        def port() -> int | None:
            log.seek(0)
            text = log.read()
            assert process.poll() is None, text[-2000:]
            found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', text)
            return int(found.group(1)) if found else None

        try:
            found = Prometheus(wait_for(port, "Prometheus to listen"))
            wait_for(lambda: found.ready() or None, "Prometheus to be ready")
            yield found
        finally:
            process.terminate()


def scrape_config(monitor: Object, every: str) -> Object:
    """What the Prometheus operator would make of a monitor, but for the interval."""
    spec, kind = monitor["spec"], monitor["kind"]
    pods = kind == "PodMonitor"
    (endpoint,) = spec["podMetricsEndpoints" if pods else "endpoints"]
    subject = "pod" if pods else "service"
    port = "pod_container_port_name" if pods else "endpoint_port_name"
    keep = [
        *_selected(spec["selector"], subject),
        _keep(f"{_META}_{port}", re.escape(endpoint["port"])),
        _keep(f"{_META}_pod_phase", "Pending|Running|Unknown"),
    ]
    usual = [
        {"source_labels": [f"{_META}_{source}"], "target_label": target}
        for source, target in (("namespace", "namespace"), ("pod_name", "pod"))
    ]
    given = [
        {"source_labels": rule["sourceLabels"], "target_label": rule["targetLabel"]}
        for rule in endpoint.get("relabelings", [])
    ]
    kept = [
        {"source_labels": rule["sourceLabels"], "regex": rule["regex"], "action": rule["action"]}
        for rule in endpoint.get("metricRelabelings", [])
    ]
    there = spec.get("namespaceSelector", {"matchNames": [monitor["metadata"]["namespace"]]})
    if not there.get("any"):
        keep.append(_keep(f"{_META}_namespace", "|".join(there["matchNames"])))
    return {
        "job_name": f"{kind}/{monitor['metadata']['name']}",
        "scrape_interval": every,
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False),
        "file_sd_configs": [
            {"files": ["pod.json" if pods else "endpoints.json"], "refresh_interval": every}
        ],
        "relabel_configs": [*keep, *usual, *given],
        "metric_relabel_configs": kept,
        "sample_limit": spec.get("sampleLimit", 0),
    }


@contextmanager
def _discovery(rest: Rest, folder: Path) -> Iterator[None]:
    """Keep pod.json and endpoints.json up to date until the end."""
    over = threading.Event()

    def look() -> None:
        pods = {(_key(pod)): pod for pod in rest.items("/api/v1/pods")}
        services = {_key(service): service for service in rest.items("/api/v1/services")}
        found = {
            "pod": [target for pod in pods.values() for target in _of_pod(pod)],
            "endpoints": [
                target
                for one in rest.items("/api/v1/endpoints")
                for target in _of_endpoints(one, services.get(_key(one), {}), pods)
            ],
        }
        for role, targets in found.items():
            new = folder / f"{role}.new"
            new.write_text(json.dumps(targets))
            new.replace(folder / f"{role}.json")

    def write() -> None:
        while not over.wait(1):
            with contextlib.suppress(OSError, http.client.HTTPException, RestError):  # once more
                look()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _of_pod(pod: Object) -> Iterator[Object]:
    """A target for each declared port of a pod that has an address."""
    address = pod["status"].get("podIP")
    for container in pod["spec"]["containers"] if address else ():
        for port in container.get("ports", []):
            labels = {f"{_META}_pod_container_port_name": port.get("name", "")}
            yield _target(f"{address}:{port['containerPort']}", {**labels, **_pod_labels(pod)})


def _of_endpoints(
    endpoints: Object, service: Object, pods: dict[tuple[str, str], Object]
) -> Iterator[Object]:
    for subset in endpoints.get("subsets", []):
        pairs = itertools.product(subset.get("addresses", []), subset.get("ports", []))
        for address, port in pairs:
            labels = {
                f"{_META}_namespace": endpoints["metadata"]["namespace"],
                f"{_META}_endpoint_port_name": port.get("name", ""),
                **_labels("service", service),
            }
            name = address.get("targetRef", {}).get("name", "")
            pod = pods.get((endpoints["metadata"]["namespace"], name))
            labels |= _pod_labels(pod) if pod else {}
            yield _target(f"{address['ip']}:{port['port']}", labels)


def _pod_labels(pod: Object) -> dict[str, str]:
    return {
        f"{_META}_namespace": pod["metadata"]["namespace"],
        f"{_META}_pod_name": pod["metadata"]["name"],
        f"{_META}_pod_phase": pod["status"]["phase"],
        **_labels("pod", pod),
    }


def _labels(subject: str, obj: Object) -> dict[str, str]:
    labels = obj.get("metadata", {}).get("labels", {})
    found = {f"{_META}_{subject}_label_{_safe(name)}": value for name, value in labels.items()}
    return found | {f"{_META}_{subject}_labelpresent_{_safe(name)}": "true" for name in labels}


def _target(address: str, labels: dict[str, str]) -> Object:
    return {"targets": [address], "labels": labels}


def _selected(selector: Object, subject: str) -> Iterator[Object]:
    for name, value in selector.get("matchLabels", {}).items():
        yield _keep(f"{_META}_{subject}_label_{_safe(name)}", re.escape(value))
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "Exists", one
        yield _keep(f"{_META}_{subject}_labelpresent_{_safe(one['key'])}", "true")


def _keep(label: str, regex: str) -> Object:
    return {"action": "keep", "source_labels": [label], "regex": regex}


def _safe(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
