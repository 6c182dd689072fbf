"""The kubectl plugin against a real API server, its pod proxy and its RBAC."""

import http.server
import json
import re
import secrets
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


def test_status_shows_each_replica_and_waits_for_none(stage, gang, port, plugin, monkeypatch):
    monkeypatch.setattr(Trainers, "silent", 2)
    running(stage, gang, port)

    def told(said: str) -> bool:
        return not any("-" in cells(row)[4:10] for row in said.splitlines()[-3:-1])

    lines = heard(lambda: plugin.says("status", gang), told).splitlines()
    assert max(map(len, lines)) <= 120
    assert f"Job:       {stage.namespace}/{gang}" in lines
    assert "Progress:  step 41/90, loss 0.25" in lines
    assert "Snapshot:  step 40, 2h ago" in lines or "Snapshot:  step 40, 120m ago" in lines
    head, first, second, silent = map(cells, lines[-4:])
    node = stage.kubelet.node
    assert dict(zip(head, first, strict=True)) == {
        "REPLICA": "0", "NODE": node, "POD": "Running", "READY": "yes", "ROUND": "1",
        "STEP": "41", "STEPS/S": "2.5", "DATA": "25%", "EXCHANGE": "12%", "SNAPSHOT": "120m",
        "LAST FAILURE": "-",
    }  # fmt: skip
    assert second[5] == "42"
    assert silent == ["2", node, "Running", "yes", *["-"] * 7]


def test_status_of_all_jobs_is_a_line_each(stage, gang, port, plugin):
    running(stage, gang, port)
    stage.apply(f"{gang}-held", suspend=True)
    stage.wait_phase(f"{gang}-held", "Suspended")
    stage.wait_status(gang, "progress", lambda s: s.get("progress", {}).get("step") == 41)

    def table(said: str) -> dict[str, list[str]]:
        return {row[0]: row for row in map(cells, said.splitlines())}

    said = heard(lambda: plugin.says("status"), lambda said: table(said)[gang][-1] != "-")
    rows = table(said)
    assert rows[gang] == [gang, "Running", "-", "3/3", "0 (+1 in place)", "41/90", "0.25", "120m"]
    assert rows[f"{gang}-held"][1] == "Suspended"
    everywhere = plugin.says("status", "-A").splitlines()
    assert [stage.namespace, gang] in [cells(line)[:2] for line in everywhere]
    stage.remove(f"{gang}-held")


def test_events_tell_the_story_in_order(stage, gang, port, plugin):
    running(stage, gang, port)
    stage.kubelet.finish(f"{gang}-1", 3, "ValueError: boom")
    running(stage, gang, port, attempt=2)
    other = {"involvedObject": {"kind": "Pod", "name": f"{gang}-x-1", "namespace": stage.namespace}}
    ours = {"involvedObject": {"kind": "Pod", "name": f"{gang}-1", "namespace": stage.namespace}}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for about, reason in ((other, "NotOurs"), (ours, "Pulled")):
        name = {"metadata": {"name": f"{reason.lower()}-{secrets.token_hex(3)}"}}
        body = {"type": "Normal", "reason": reason, "message": "told", "lastTimestamp": now}
        stage.rest.post(stage.path("events"), {**about, **name, **body, "count": 4})

    def story() -> list[list[str]] | None:
        found = list(map(cells, plugin.says("events", gang).splitlines()))
        found = [row for row in found if len(row) > 1]  # else a message's next line
        reasons = [row[-2] for row in found]
        return found if reasons.count("Running") == 2 and "Pulled" in reasons else None

    rows = eventually("the Events to be there", story)
    reasons = [row[-2] for row in rows]
    assert "NotOurs" not in reasons
    failed = next(row for row in rows if row[-2] == "User/ExitCode3")
    assert failed[1:4] == ["replica 1", "1", "-"]
    assert failed[-1] == f"on {stage.kubelet.node}"
    # Within a second, which is all that Events tell, causes come before what follows.
    assert reasons.index("User/ExitCode3") < reasons.index("Restarting")
    told = [one for one in reasons if one in ("Started", "Restarting")]
    assert told == ["Started", "Restarting"]
    assert reasons[::-1].index("Running") < reasons[::-1].index("Restarting")
    pulled = rows[reasons.index("Pulled")]
    assert "(x4 over" in pulled[0]
    assert "ValueError: boom" in plugin.says("status", gang)
    gone = plugin.says("logs", gang, "--failed")
    assert "the pod of attempt 1 is gone" in gone
    assert "ValueError: boom" in gone


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


def test_four_rights_are_enough_to_look(stage, gang, port, control_plane, tmp_path):
    running(stage, gang, port)
    viewer = user(control_plane, stage.namespace, "viewer", VIEWER, tmp_path)

    def step(said: str) -> str:
        return cells(said.splitlines()[-1])[5]

    said = heard(lambda: viewer.says("status", gang), lambda said: step(said) != "-")
    assert step(said) == "43"

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


def test_errors_are_one_line_with_the_cure(plugin, tmp_path):
    assert 'no DDPJob "absent" here: `kubectl ddp status -A`' in plugin.refuses("status", "absent")
    assert 'no DDPJob "absent"' in plugin.refuses("suspend", "absent")
    assert "absent" in plugin.refuses("status", "--context=absent")
    nowhere = Plugin(tmp_path / "absent", plugin.namespace)
    assert nowhere.refuses("status").startswith("kubectl-ddp: kubectl:")


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
