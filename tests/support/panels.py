"""The dashboard's panels as Grafana would ask for them, and the record that docs draw them from."""

from __future__ import annotations

import json
import re
import time

from support.cluster import ROOT
from support.prometheus import Prometheus
from support.rest import Object

DASHBOARD = ROOT / "charts" / "ddpjob" / "files" / "dashboard.json"
RECORD = ROOT / "docs" / "pictures" / "dashboard.json"
POINTS, SERIES = 60, 6


def shown() -> list[Object]:
    """The panels of the dashboard, without the titles between them."""
    return [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]


def expression(target: Object, namespace: str) -> str:
    """A target's query with the variables filled in."""
    values = {"$namespace": namespace, "$ddpjob": ".*", "$__rate_interval": "1m"}
    found: str = target["expr"]
    for name, value in values.items():
        found = found.replace(name, value)
    return found


def queries(panel: Object) -> list[str]:
    """What a panel asks, variables and all."""
    return [target["expr"] for target in panel["targets"]]


def write(watch: Prometheus, namespace: str, begun: float) -> None:
    """Write what each panel shows from then to now; the namespace becomes "team"."""
    step = (time.time() - begun) / POINTS

    def series(target: Object) -> list[Object]:
        span = {"start": str(begun + step), "end": str(begun + POINTS * step), "step": str(step)}
        asked = watch.ask("query_range", query=expression(target, namespace), **span)
        return [line(target["legendFormat"], one) for one in asked["result"]]

    def line(legend: str, one: Object) -> Object:
        told = re.sub(r"{{(\w+)}}", lambda found: one["metric"].get(found[1], ""), legend)
        values: list[float | None] = [None] * POINTS
        for at, value in one["values"]:
            if value != "NaN":
                values[round((at - begun) / step) - 1] = float(f"{float(value):.3g}")
        return {"legend": told.replace(namespace, "team").strip() or "none", "values": values}

    def largest(panel: Object) -> list[Object]:
        found = [one for target in panel["targets"] for one in series(target)]
        found.sort(key=lambda one: -max((v for v in one["values"] if v is not None), default=0))
        return found[:SERIES]

    panels = [
        {
            "title": panel["title"],
            "unit": panel["fieldConfig"]["defaults"]["unit"],
            "queries": queries(panel),
            "series": largest(panel),
        }
        for panel in shown()
    ]
    text = ",\n".join(json.dumps(one) for one in panels)
    RECORD.write_text(f'{{"step": {step:.2f}, "panels": [\n{text}\n]}}\n')
