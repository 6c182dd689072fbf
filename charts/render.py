"""Produces manifests/{crd,install}.yaml, docs/reference/api.md, the chart's README from the chart.

    .venv/bin/python charts/render.py            write the files
    .venv/bin/python charts/render.py --check    exit 1 and name the files that differ

Needs helm: $HELM, else one of the pinned version on PATH, else devcluster's own (built once).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import apidoc
import chartdoc
import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "ddpjob"
NAMESPACE = "ddpjob-system"
HEADER = "# Rendered from charts/ddpjob by charts/render.py; change the chart instead.\n"
NAMESPACE_MANIFEST = f"""\
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/part-of: ddpjob
    pod-security.kubernetes.io/enforce: restricted
"""


def find_helm() -> str:
    """Return the path of helm, building it when no suitable one is installed."""
    if given := os.environ.get("HELM"):
        return given
    sys.path.insert(0, str(ROOT / "dev/devcluster/src"))
    from devcluster import binaries

    return str(binaries.ensure(["helm"], lambda line: print(line, file=sys.stderr))["helm"])


def helm_template(*args: str) -> list[str]:
    """Render the chart as release ``ddpjob`` -> its manifests in helm's order."""
    command = [find_helm(), "template", "ddpjob", str(CHART), "--namespace", NAMESPACE, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    parts = re.split(r"^---\s*$", done.stdout, flags=re.MULTILINE)
    # Without the "# Source:" lines and stray blank lines the text is the same for every helm.
    cleaned = (re.sub(r"^# Source:.*\n", "", part, flags=re.MULTILINE).strip() for part in parts)
    return [f"{part}\n" for part in cleaned if part]


def render() -> dict[Path, str]:
    """Return the text of every produced file by path."""
    definition = helm_template("--show-only", "templates/crd.yaml")
    everything = [NAMESPACE_MANIFEST, *helm_template("--skip-tests")]
    return {
        ROOT / "manifests" / "crd.yaml": HEADER + "---\n".join(definition),
        ROOT / "manifests" / "install.yaml": HEADER + "---\n".join(everything),
        CHART / "README.md": chartdoc.render((CHART / "values.yaml").read_text()),
        ROOT / "docs" / "reference" / "api.md": apidoc.render(yaml.safe_load(definition[0])),
    }


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description="Produce manifests/*.yaml from the chart.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if stale")
    check = parser.parse_args().check
    stale = []
    for path, text in render().items():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    if check and stale:
        sys.exit(f"not what charts/render.py produces: {', '.join(stale)}; run it")


if __name__ == "__main__":
    main()
