"""A real Prometheus on this machine, which reads what the chart's monitors mean.

The Prometheus operator turns a ServiceMonitor or a PodMonitor into a scrape configuration; here it
is done by hand for the few fields that ours have.
Debian's Prometheus is built without discovery in Kubernetes: a thread of ours lists the targets.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
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
from support.rest import Object, urlopen


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Its HTTP API."""

    port: int

    def ready(self) -> bool:
        """Whether it takes queries: it listens before it does."""
        with contextlib.suppress(OSError):
            return bool(self._get("/-/ready"))
        return False

    def ask(self, path: str, **parameters: str) -> Any:
        """GET /api/v1/PATH -> data. OSError while it does not answer."""
        return json.loads(self._get(f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))["data"]

    def _get(self, path: str) -> bytes:
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
            found: bytes = answer.read()
        return found

    def query(self, expression: str) -> list[Object]:
        """The series of an instant query."""
        return list(self.ask("query", query=expression)["result"])

    def firing(self) -> dict[str, Object]:
        """Labels of alerts that fire now, by name."""
        alerts = self.ask("alerts")["alerts"]
        return {a["labels"]["alertname"]: a["labels"] for a in alerts if a["state"] == "firing"}


@contextmanager
def started(configuration: Object, folder: Path) -> Iterator[Prometheus]:
    """Prometheus as it is configured; gone at the end."""
    host.ensure_packages({"prometheus": "prometheus"}, print)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    # The log tells the port: it takes a free one.
    command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    command.append("--web.listen-address=127.0.0.1:0")
    with (
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
            wait_for(found.ready, "Prometheus to be ready")
            yield found
        finally:
            process.terminate()


_LIMITS = {
    "sample_limit": "sampleLimit",
    "body_size_limit": "bodySizeLimit",
    "label_limit": "labelLimit",
    "label_name_length_limit": "labelNameLengthLimit",
    "label_value_length_limit": "labelValueLengthLimit",
}


def scrape_config(monitor: Object, every: str) -> Object:
    """What the Prometheus operator would make of a monitor, but for discovery and interval."""
    spec, endpoint = monitor["spec"], _endpoint(monitor)
    kept = [
        {"source_labels": rule["sourceLabels"], "regex": rule["regex"], "action": rule["action"]}
        for rule in endpoint.get("metricRelabelings", [])
    ]
    return {
        "job_name": monitor["kind"],
        "scrape_interval": every,
        "metrics_path": endpoint["path"],
        "honor_labels": endpoint.get("honorLabels", False),
        "file_sd_configs": [{"files": [f"{monitor['kind']}.json"], "refresh_interval": every}],
        "metric_relabel_configs": kept,
        **{name: spec.get(field, 0) for name, field in _LIMITS.items()},
    }


def _endpoint(monitor: Object) -> Object:
    spec = monitor["spec"]
    (found,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    return dict(found)
