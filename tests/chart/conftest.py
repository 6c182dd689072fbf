"""The real helm binary, and the chart rendered with given values."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from devcluster import binaries
from support.chart import CHART, Helm, Objects, Template


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Return a function that runs helm with the given arguments."""
    program = binaries.ensure(["helm"], print)["helm"]

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *args], capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def template(helm: Helm) -> Template:
    """Return a function: helm arguments -> rendered objects."""

    def run(*args: str) -> Objects:
        done = helm("template", "ddpjob", str(CHART), "--namespace", "ops", *args)
        assert done.returncode == 0, done.stderr
        objects = [body for body in yaml.safe_load_all(done.stdout) if body]
        found = {}
        for body in objects:
            meta = body["metadata"]
            place = [meta["namespace"]] if meta.get("namespace", "ops") != "ops" else []
            found["/".join([body["kind"], *place, meta["name"]])] = body
        assert len(found) == len(objects), "two rendered objects have one name"
        return found

    return run
