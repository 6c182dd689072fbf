"""Ends as real kubelets and runtimes write them: whose they are, and what the status tells."""

from typing import Any

import pytest

from support.cluster import wait_for
from support.site import Site, job, trainer

pytestmark = pytest.mark.tier("all")  # tests/unit/operator_core/test_classify.py has the tables
#: A child takes more memory than the container may have and is killed; its parent goes on.
SURVIVES = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
hoard = "x = []\\nwhile True: x.append(bytearray(10_000_000))"
print("child", subprocess.run([sys.executable, "-c", hoard]).returncode, flush=True)
while True: time.sleep(0.1)
"""


def failed(site: Site, name: str) -> dict[str, Any]:
    """The first failure that is told."""

    failures: list[dict[str, Any]] = wait_for(
        lambda: site.status(name).get("failures"), f"a failure of {name}"
    )
    return failures[0]


@pytest.mark.fault("N5")
def test_a_survived_out_of_memory_is_not_the_cause_of_a_later_eviction(site):
    name = "survivor"
    body = job(name, ["python3", "-c", SURVIVES], restart={"maxRestarts": 1})
    trainer(body)["resources"] = {"limits": {"memory": "100Mi"}}
    site.apply(body)
    site.wait_running(name, 1)
    said = lambda: "child -9" in site.kubectl("logs", f"{name}-1", check=True).stdout  # noqa: E731
    wait_for(said, "the child to be killed")
    site.evict(f"{name}-1")
    loss = failed(site, name)
    assert (loss["class"], loss["reason"]) == ("Disruption", "EvictionByEvictionAPI")
    assert site.wait_running(name, 2)["restarts"]["charged"] == 0
    site.delete(name)


@pytest.mark.fault("N5")
def test_a_volume_beyond_its_own_limit_is_charged_in_the_kubelets_words(site):
    name = "outgrown"
    script = "sleep 5; dd if=/dev/zero of=/scratch/x bs=1M count=64 2>&1; sync; sleep 3600"
    body = job(name, ["sh", "-c", f"[ $DDPJOB_REPLICA = 1 ] || sleep 3600; {script}"])
    pod = body["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "scratch", "emptyDir": {"sizeLimit": "8Mi"}}]
    trainer(body)["volumeMounts"] = [{"name": "scratch", "mountPath": "/scratch"}]
    site.apply(body)
    loss = failed(site, name)
    assert (loss["replica"], loss["class"], loss["reason"]) == (1, "User", "StorageLimitExceeded")
    assert loss["exception"].startswith('Usage of EmptyDir volume "scratch" exceeds the limit')
    assert site.wait_running(name, 2)["restarts"]["charged"] == 1
    site.delete(name)


@pytest.mark.fault("N18")
@pytest.mark.parametrize("kind", ["livenessProbe", "startupProbe"])
def test_a_program_that_its_own_probe_ends_is_charged(site, kind):
    """What its probe looks for is gone after a while, or never there."""
    name = f"probed-{kind[:5].lower()}"
    alive = "touch /tmp/alive; sleep 3; rm /tmp/alive; " if kind == "livenessProbe" else ""
    script = f"trap 'exit 143' TERM; {alive}while :; do sleep 1; done"
    body = job(name, ["sh", "-c", script])
    body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    look = {"exec": {"command": ["cat", "/tmp/alive"]}, "periodSeconds": 1, "failureThreshold": 3}
    trainer(body)[kind] = look
    site.apply(body)
    loss = failed(site, name)
    assert (loss["class"], loss["reason"], loss["exitCode"]) == ("User", "ProbeFailed", 143)
    assert loss["message"].startswith("the container ended on SIGTERM")
    assert site.status(name)["restarts"]["charged"] == 1
    site.delete(name)


@pytest.mark.fault("N8")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ["no-such-program"]}, "no-such-program"),
        ({"workingDir": "/etc/hostname"}, "not a directory"),
    ],
)
def test_a_start_that_no_other_node_would_change_is_final(site, fields, words):
    name = "unstartable-" + "-".join(fields).lower()
    body = job(name, ["sleep", "3600"])
    trainer(body).update(fields)
    site.apply(body)
    loss = site.wait_phase(name, "Failed")["lastFailure"]
    assert (loss["class"], loss["reason"]) == ("Permanent", "StartError")
    assert words in loss["exception"]
    assert site.condition(name, "Failed")["reason"] == "PermanentFailure"
    site.delete(name)
