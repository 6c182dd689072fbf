"""The kubectl plugin against a real API server, its pod proxy and its RBAC."""

import http.server
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from support.arena import Arena
from support.cluster import ROOT, Cluster
from support.plugin import Plugin, environment, user
from support.pods import serving
from support.rest import eventually

PAGE = (ROOT / "docs" / "reference" / "plugin.md").read_text()
#: The rights that the page asks for: to look at jobs, pods and Events; at pods' pages.
VIEWER = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])["rules"]
STATE = {"version": 1, "attempt": 1, "round": 1, "phase": "step", "step": 41, "totalSteps": 90,
         "loss": 0.25, "snapshotStep": 40, "stepsPerSecond": 2.5}  # fmt: skip


class Trainers(http.server.BaseHTTPRequestHandler):
    """The pages of all pods, which have one address: the API server says whom it asks for."""

    silent: int | None = None  # a replica that takes the request and does not answer
    over = threading.Event()

    def do_GET(self) -> None:
        asked = re.search(r"-(\d+):\d+/proxy/", self.headers.get("X-Forwarded-Uri", ""))
        replica = int(asked[1]) if asked else 0
        if replica == self.silent:
            self.over.wait(300)
            return
        path, _, query = self.path.partition("?")
        if path == "/state":
            state = {**STATE, "step": 41 + replica}
            named = re.fullmatch("uid=[-0-9a-f]{36}", query)  # strangers are told no stacks
            stacks = {"stacks": "in forward()\x1b[2J"} if replica and named else {}
            page = json.dumps({**state, **stacks})
        else:
            at = time.time() - 7200
            page = f'ddpjob_trainer_snapshot_timestamp_seconds{{rank="0"}} {at}\n'
            for activity, seconds in {"data": 2, "forward": 5, "backward": 1, "start": 99}.items():
                labels = f'{{activity="{activity}",rank="0"}}'
                page += f"ddpjob_trainer_phase_seconds_total{labels} {seconds}.0\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port(stage: Arena) -> Iterator[int]:
    """Where the trainers' pages are, at the address that every pod has."""
    with serving(stage.kubelet, Trainers) as found:
        yield found
        Trainers.over.set()


@pytest.fixture
def plugin(stage: Arena, control_plane: Cluster) -> Plugin:
    return Plugin(control_plane.kubeconfig, stage.namespace)


def running(stage: Arena, name: str, port: int, attempt: int = 1) -> None:
    if attempt == 1:
        stage.apply(name, metrics={"port": port})
    stage.wait_phase(name, "Running", attempt=attempt)
    stage.wait_status(name, "all ready", lambda s: s["replicas"]["ready"] == 3)


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def heard(what: Callable[[], str], told: Callable[[str], object]) -> str:
    """What it says once the pods were heard: it waits for 3 s, too short for a slow machine."""

    def look() -> str | None:
        said = what()
        return said if told(said) else None

    return eventually("the pods are heard", look)


def test_suspend_and_resume(stage, gang, port, plugin):
    running(stage, gang, port)
    assert "is not suspended" in plugin.says("resume", gang)
    assert "its pods get SIGTERM" in plugin.says("suspend", gang)
    stage.wait_phase(gang, "Suspended")
    assert "suspended already" in plugin.says("suspend", gang)
    assert "attempt 2" in plugin.says("resume", gang)
    stage.wait_phase(gang, "Running", attempt=2)
    stage.succeed(gang)
    for verb in ("suspend", "resume"):
        assert f"{gang} has succeeded, which is final" in plugin.refuses(verb, gang)
    assert "spec" in stage.rest.get(stage.job_path(gang))
    assert not stage.rest.get(stage.job_path(gang))["spec"]["suspend"]


def test_four_rights_are_enough_to_look(stage, gang, port, control_plane, tmp_path, monkeypatch):
    """And a pod that does not answer holds up none of it."""
    monkeypatch.setattr(Trainers, "silent", 0)
    running(stage, gang, port)
    viewer = user(control_plane, stage.namespace, "viewer", VIEWER, tmp_path)

    def step(said: str) -> str:
        return cells(said.splitlines()[-1])[5]

    said = heard(lambda: viewer.says("status", gang), lambda said: step(said) != "-")
    assert step(said) == "43"
    assert cells(said.splitlines()[-3]) == ["0", stage.kubelet.node, "Running", "yes", *["-"] * 7]

    def stacks_told() -> str:
        done = viewer.run("stacks", gang, "--hung")
        return done.stdout if (done.returncode, done.stderr) == (0, "") else ""

    stacks = heard(stacks_told, lambda said: f"--- {gang}-1" in said)
    assert stacks.startswith(f"--- {gang}-1, attempt 1")
    assert "in forward()?[2J" in stacks, "what a container says moves no cursor"
    assert gang in viewer.says("status")
    heard(lambda: viewer.says("events", gang), lambda said: "Started" in said)
    heard(lambda: viewer.run("account", gang).stdout, lambda said: "POD-TIME" in said)
    refused = viewer.refuses("suspend", gang)
    assert f"you may not patch ddpjobs of ddpjob.dev in namespace {stage.namespace}" in refused


def test_what_a_right_is_missing_for_is_said(stage, gang, port, control_plane, tmp_path):
    running(stage, gang, port)
    nobody = user(control_plane, stage.namespace, "nobody", [], tmp_path)
    assert "you may not list ddpjobs of ddpjob.dev in namespace" in nobody.refuses("status")
    without = user(control_plane, stage.namespace, "no-proxy", VIEWER[:-1], tmp_path)
    done = without.run("status", gang)
    assert done.returncode == 0
    assert cells(done.stdout.splitlines()[-1])[:4] == ["2", stage.kubelet.node, "Running", "yes"]
    right = "you may not get pods/proxy in namespace"
    heard(lambda: without.run("status", gang).stderr, lambda said: right in said)
    heard(lambda: without.refuses("stacks", gang, "--hung"), lambda said: right in said)
    assert "you may not list ddpjobs" in nobody.refuses("status", "-A")
    assert "in all namespaces" in nobody.refuses("status", "-A")


def test_the_single_file_is_a_plugin_of_kubectl(plugin, tmp_path):
    made = ["make", "-C", str(ROOT), "plugin", f"DIST={tmp_path}"]
    subprocess.run(made, check=True, capture_output=True)
    env = {**environment(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        ["kubectl", "ddp", "status", f"--kubeconfig={plugin.kubeconfig}", "-A"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "NAMESPACE" in done.stdout or "no DDPJobs" in done.stdout
