"""`make demo`: a DDPJob on a real cluster loses a process, then a pod; the weights are the same.

Everything goes through the tools a user has: helm, kubectl and the example manifest. With
KUBECONFIG_DEMO set, that cluster is used instead of a local one, with the helm and kubectl on
PATH; an operator that is installed there is left as it is. DDPJOB_DEMO_REGISTRY names where its
nodes pull the two images from, as REGISTRY/operator:0.2.0 and REGISTRY/trainer:0.2.0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVCLUSTER = ROOT / "dev/devcluster/devcluster"
MANIFEST = ROOT / "manifests" / "examples" / "digits.yaml"
CLUSTER = "demo"
NAMESPACE = "ddpjob-demo"
SYSTEM = "ddpjob-system"
IMAGES = ("ddpjob/operator:0.2.0", "ddpjob/trainer:0.2.0")
REGISTRY = os.environ.get("DDPJOB_DEMO_REGISTRY", "ddpjob")
JOB, TWIN = "digits", "digits-undisturbed"
#: The replica that loses its training process, once half of the steps are done, and the one
#: whose pod is deleted, once three quarters are.
KILLED, DELETED = 1, 2
WANTED_ACCURACY = 0.95
JOB_TIMEOUT = 900.0


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""


@dataclass
class Tools:
    """kubectl and helm for one cluster, with a clock for the log."""

    kubeconfig: Path
    bin: Path | None  # None: those on PATH
    began: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        """Print a line with the time since the start."""
        print(f"[{time.monotonic() - self.began:6.1f}s] {line}", flush=True)

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl in the demo's namespace; return what it printed."""
        return self._run("kubectl", "-n", NAMESPACE, *args, stdin=stdin, check=check)

    def helm(self, *args: str) -> str:
        """Run helm; return what it printed."""
        return self._run("helm", *args)

    def job(self, name: str) -> dict[str, Any]:
        """Return the DDPJob as the API server has it."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "ddpjob", name, "-o", "json"))
        return found

    def _run(self, program: str, *args: str, stdin: str | None = None, check: bool = True) -> str:
        own = str(self.bin / program) if self.bin else program
        command = [own, "--kubeconfig", str(self.kubeconfig)]
        done = subprocess.run(
            [*command, *args], input=stdin, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise DemoError(f"{program} {' '.join(args)}:\n{done.stderr.strip()}")
        return done.stdout


def main() -> int:
    """Run the demo; 0 if the weights are identical and the accuracy is reached."""
    try:
        tools = cluster()
        install(tools)
        run_disturbed(tools)
        ok = compare(tools)
        next_commands(tools)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the cluster is still up, `make down` removes it", file=sys.stderr)
        return 130
    return 0 if ok else 1


def cluster() -> Tools:
    """Bring up a local two-node cluster with the images, or take the user's own."""
    if given := os.environ.get("KUBECONFIG_DEMO"):
        if not Path(given).is_file():
            raise DemoError(f"KUBECONFIG_DEMO: there is no file {given}")
        for program in ("helm", "kubectl"):
            if shutil.which(program) is None:
                raise DemoError(f"KUBECONFIG_DEMO needs {program} on PATH: install it")
        return Tools(Path(given), None)
    binaries = Path(devcluster("build").strip())
    devcluster("image", "build", "operator", "trainer")
    images = [word for image in IMAGES for word in ("--image", image)]
    kubeconfig = devcluster("up", "--nodes", "2", *images)
    return Tools(Path(kubeconfig.strip()), binaries)


def devcluster(*args: str) -> str:
    """Its progress goes to the terminal, its result comes back."""
    command = [sys.executable, str(DEVCLUSTER), "--name", CLUSTER, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DemoError(f"`{' '.join(command[1:])}` failed, see above")
    return done.stdout


def install(tools: Tools) -> None:
    """Install the chart as README says; poll progress often, since the demo is short."""
    own_cluster = "KUBECONFIG_DEMO" in os.environ
    if own_cluster and tools.helm("list", "-n", SYSTEM, "-q", "--filter", "^ddpjob$").strip():
        tools.say("the operator is installed already and left as it is")
    else:
        tools.say("installing the operator: helm upgrade --install ddpjob charts/ddpjob")
        tools.helm(
            "upgrade", "--install", "ddpjob", str(ROOT / "charts" / "ddpjob"),
            "--namespace", SYSTEM, "--create-namespace", "--set", "progressSeconds=1",
            "--set", f"image.repository={REGISTRY}/operator", "--wait", "--timeout", "180s",
        )  # fmt: skip
    tools._run("kubectl", "create", "namespace", NAMESPACE, check=False)
    tools.say("the operator is ready")
    # A demo that is repeated starts from nothing, snapshots included.
    names = ["ddpjob", JOB, TWIN, "--ignore-not-found", "--cascade=foreground"]
    tools.kubectl("delete", *names, "--wait", "--timeout=120s")
    tools.kubectl("delete", "-f", str(MANIFEST), "--ignore-not-found", "--wait", "--timeout=120s")


def manifest() -> str:
    """Return the example as it is, but for where its image comes from."""
    return MANIFEST.read_text().replace("image: ddpjob/", f"image: {REGISTRY}/")


def run_disturbed(tools: Tools) -> None:
    """Run the manifest's job; kill a process half-way, and later a pod."""
    tools.say(f"kubectl apply -f {MANIFEST.relative_to(ROOT)}")
    tools.kubectl("apply", "-f", "-", stdin=manifest())
    killed = back = deleted = False
    for status in watch(tools, JOB):
        progress = status.get("progress", {})
        step, total = progress.get("step", 0), progress.get("totalSteps", 0)
        if status.get("phase") != "Running" or not total:
            continue
        if not killed and step >= total // 2:
            kill_process(tools, f"{JOB}-{KILLED}", step)
            killed = True
        if killed and not back and came_back(status):
            show_in_place(tools)
            back = True
        if back and not deleted and step >= total * 3 // 4:
            delete_pod(tools, f"{JOB}-{DELETED}", step)
            deleted = True
    if not deleted:
        raise DemoError("the job ended before it could be disturbed twice; please report this")
    show_causes(tools)


def kill_process(tools: Tools, pod: str, step: int) -> None:
    """SIGKILL the one that keeps a rank's record; the launcher's other children are spares."""
    tools.say(f"--- killing the training process in pod {pod} at step {step}: kill -9 ---")
    script = "kill -9 $(grep -l '/rank-[0-9]*[.]state' /proc/[0-9]*/maps | cut -d/ -f3 | head -n 1)"
    tools.kubectl("exec", pod, "-c", "trainer", "--", "sh", "-c", script, check=False)


def came_back(status: dict[str, Any]) -> bool:
    """In place, as it should; or, if the launchers could not, by a new attempt."""
    return bool(restarts(status)["inPlace"] or restarts(status)["total"])


def restarts(status: dict[str, Any]) -> dict[str, int]:
    """.status.restarts, before it is there too."""
    return {"inPlace": 0, "total": 0} | status.get("restarts", {})


def show_in_place(tools: Tools) -> None:
    """Show that the processes are new and the pods are the same."""
    tools.say(f"kubectl get ddpjob {JOB} -o wide; kubectl get pods")
    print(indent(tools.kubectl("get", "ddpjob", JOB, "-o", "wide")), end="")
    print(indent(tools.kubectl("get", "pods", "-l", f"ddpjob.dev/job-name={JOB}")), flush=True)


def delete_pod(tools: Tools, pod: str, step: int) -> None:
    """As a drain or an eviction does: the gang gets new pods."""
    tools.say(f"--- kubectl delete pod {pod} at step {step} ---")
    tools.kubectl("delete", "pod", pod, "--wait=false")


def show_causes(tools: Tools) -> None:
    """Show what a user sees afterwards."""
    tools.say(f"kubectl get ddpjob {JOB}")
    print(indent(tools.kubectl("get", "ddpjob", JOB)))
    tools.say(f"kubectl describe ddpjob {JOB} (failures and events)")
    text = tools.kubectl("describe", "ddpjob", JOB)
    failures = re.search(r"^  Failures:\n(?:    .*\n|\s*\n)+", text, re.MULTILINE)
    events = re.search(r"^Events:\n(?:.*\n)+", text, re.MULTILINE)
    print(indent((failures.group() if failures else "") + (events.group() if events else "")))


def compare(tools: Tools) -> bool:
    """Run the same job once more, undisturbed, under another name."""
    tools.say(f"now the same job undisturbed, as {TWIN}")
    claim, job = manifest().split("\n---\n", 1)
    del claim  # the twin shares the volume; its snapshots have a directory of their own
    twin, count = re.subn(rf"^  name: {JOB}$", f"  name: {TWIN}", job, flags=re.MULTILINE)
    if count != 1:
        raise DemoError(f"{MANIFEST}: expected one line `  name: {JOB}` in the DDPJob")
    tools.kubectl("apply", "-f", "-", stdin=twin)
    for _ in watch(tools, TWIN):
        pass
    disturbed, undisturbed = result(tools, JOB), result(tools, TWIN)
    accuracy = float(disturbed["test_accuracy"])
    same = disturbed["weights_sha256"] == undisturbed["weights_sha256"]
    count = restarts(tools.job(JOB)["status"])
    print()
    print(f"  test accuracy              {accuracy:.2%} (at least {WANTED_ACCURACY:.0%} wanted)")
    print(f"  restarts in place          {count['inPlace']} (a process was killed)")
    print(f"  restarts with new pods     {count['total']} (a pod was deleted)")
    print(f"  weights, disturbed twice   sha256 {disturbed['weights_sha256']}")
    print(f"  weights, undisturbed       sha256 {undisturbed['weights_sha256']}")
    print(f"  the two are                {'identical' if same else 'DIFFERENT'}")
    print(flush=True)
    both = count["inPlace"] > 0 and count["total"] > 0
    return same and accuracy >= WANTED_ACCURACY and both


def watch(tools: Tools, name: str) -> Iterator[dict[str, Any]]:
    """Yield each new status and print a line for it, until the job has succeeded."""
    deadline, shown = time.monotonic() + JOB_TIMEOUT, ""
    while time.monotonic() < deadline:
        status = tools.job(name).get("status", {})
        line = describe(name, status)
        if line != shown:
            tools.say(line)
            shown = line
            yield status
        if status.get("phase") == "Succeeded":
            return
        if status.get("phase") == "Failed":
            raise DemoError(f"the job failed: {json.dumps(status.get('lastFailure'), indent=2)}")
        time.sleep(0.5)
    raise DemoError(
        f"{name} did not end within {JOB_TIMEOUT:.0f} s: kubectl describe ddpjob {name}"
    )


def describe(name: str, status: dict[str, Any]) -> str:
    """One line of live progress."""
    progress = status.get("progress", {})
    loss = progress.get("loss")
    parts = [
        f"{name}: {status.get('phase', 'Pending'):<10}",
        f"ready {status.get('ready', '0/3')}",
        f"restarts {restarts(status)['total']} (in place {restarts(status)['inPlace']})",
        f"step {progress.get('step', '-')}/{progress.get('totalSteps', '-')}",
        f"loss {loss:.4f}" if loss is not None else "loss -",
    ]
    stalled = [
        f"[{c['reason']}: {c['message']}]"
        for c in status.get("conditions", [])
        if c["type"] == "Stalled" and c["status"] == "True"
    ]
    return "  ".join(parts + stalled)


def result(tools: Tools, name: str) -> dict[str, str]:
    """Return the `key=value` lines that the example prints at its end."""
    found = dict(re.findall(r"(\w+)=(\S+)\s*$", tools.kubectl("logs", f"{name}-0"), re.MULTILINE))
    missing = {"test_accuracy", "weights_sha256"} - found.keys()
    if missing:
        raise DemoError(f"the log of {name}-0 lacks {', '.join(sorted(missing))}")
    return found


def next_commands(tools: Tools) -> None:
    """Print commands to try: the cluster stays up."""
    print("The cluster is still up. Try:")
    path = f" PATH={tools.bin}:$PATH" if tools.bin else ""
    print(f"  export KUBECONFIG={tools.kubeconfig}{path}")
    print(f"  kubectl -n {NAMESPACE} get ddpjobs,pods -o wide")
    print(f"  kubectl -n {NAMESPACE} logs {JOB}-0                     # the last attempt's log")
    print(f"  kubectl -n {NAMESPACE} apply -f manifests/examples/plain-torchrun.yaml")
    print(f"  kubectl -n {NAMESPACE} delete pod plain-torchrun-1   # then watch it come back")
    print("  kubectl explain ddpjob.spec                         # write a job of your own")
    print("  make down                                           # remove the cluster", flush=True)


def indent(text: str) -> str:
    """Set output of other programs apart from our own."""
    return "".join(f"    {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
