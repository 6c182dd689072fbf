"""Five attempts end in five ways, all pods are gone and one machine is off: `why` has the story."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster import wait_for
from support.patience import WITHIN
from support.plugin import Plugin
from support.site import CLAIM, SYSTEM, Site, job, trainer

pytestmark = pytest.mark.tier("all")
NAME = "lives"
#: Attempts 1, 2 and 6 end by themselves; what the others say tells that they can be disturbed.
SCRIPT = """
import os, signal, sys, time
rank, life = int(os.environ["RANK"]), int(os.environ["DDPJOB_ATTEMPT"])
print(f"rank {rank} begins life {life}", flush=True)
if rank == 1 and life in (1, 2, 6):
    time.sleep(3)
    print(f"last words of life {life}", flush=True)
    if life == 1:
        raise ValueError("boom in life 1")
    if life == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def machines(site: Site) -> Iterator[None]:
    """Both nodes are there, before and after."""
    yield
    for node in ("node1", "node2"):
        site.cluster.node("start", node)
    site.cluster.kubectl("wait", "--for=condition=Ready", WITHIN, "node/node1", "node/node2")
    rolled = ("rollout", "status", "deployment/ddpjob-operator", WITHIN)
    site.cluster.kubectl("-n", SYSTEM, *rolled, check=True)
    site.wait_leader()


def lives() -> dict[str, Any]:
    claim = {"persistentVolumeClaim": {"claimName": CLAIM}}
    body = job(
        NAME,
        ["sh", "-c", 'printf %s "$SCRIPT" > /tmp/s.py; exec ddpjob-trainer run /tmp/s.py'],
        snapshot={"path": "/snapshots", "volume": claim},
        nodeLost={"policy": "Fence", "afterSeconds": 5},
        restart={
            "maxRestarts": 3, "replaceSeconds": 0, "inPlace": {"enabled": False},
            "backoff": {"initialSeconds": 1, "maxSeconds": 1},
        },
    )  # fmt: skip
    trainer(body)["env"] = [{"name": "SCRIPT", "value": SCRIPT}]
    return body


def written(site: Site, attempt: int, rank: int) -> None:
    """Wait until a launcher has kept its first lines: it looks for some every few seconds."""
    folders = f"evidence/attempt-{attempt}-round-0-*/replica-{rank}.json"

    def there() -> bool:
        files = (site.volume() / NAME).glob(folders)
        return any(f"rank {rank} begins life {attempt}" in file.read_text() for file in files)

    site.wait(NAME, there, f"the first lines of rank {rank} in attempt {attempt}")


def test_every_cause_is_readable_when_all_pods_are_gone(site, machines):
    site.apply(lives())
    site.wait_running(NAME, 3)  # two ended by themselves
    written(site, 3, 2)
    site.kubectl("delete", "pod", f"{NAME}-2", "--force", "--grace-period=0", check=True)
    site.wait_running(NAME, 4)
    written(site, 4, 2)
    site.kill_launcher(f"{NAME}-2")
    site.wait_running(NAME, 5)
    for rank in range(3):
        written(site, 5, rank)
    off = site.pods(NAME)[f"{NAME}-2"]["spec"]["nodeName"]
    site.cluster.node("stop", off)
    assert site.wait_phase(NAME, "Failed")["attempt"] == 6
    site.kubectl("delete", "pods", "-l", f"ddpjob.dev/job-name={NAME}", "--force", check=True)
    wait_for(lambda: not site.pods(NAME), "all pods to be gone")

    plugin = Plugin(site.cluster.kubeconfig, site.namespace)
    assert f"kubectl ddp why {NAME} --reader starts one" in plugin.says("why", NAME)
    done = plugin.run("why", NAME, "--all", "--reader", "--yes")
    assert done.returncode == 0, done.stderr
    head, *pages = re.split(r"^\d\. ", done.stdout, flags=re.MULTILINE)
    assert "Failed, attempt 6" in head
    assert "MaxRestartsExceeded" in head
    assert "(without" not in done.stdout, done.stdout
    by_attempt = {int(page.partition("(attempt ")[2].partition(",")[0]): page for page in pages}
    wanted = {
        6: ("rank 1, replica 1", "User, exit code 3", "| last words of life 6", "ended the job"),
        5: ("lost, not by the program", f"node {off}", "| rank", "maxDisruptions", "as of"),
        4: ("rank 2, replica 2", "SIGKILL", "| rank 2 begins life 4", "Last lines as of"),
        3: (f"pod {NAME}-2", "PodDeleted", "| rank 2 begins life 3", "maxDisruptions"),
        2: ("rank 1, replica 1", "Killed, SIGKILL", "| last words of life 2", "restart 2 of"),
        1: ("ValueError: boom in life 1", "| last words of life 1", "restart 1 of at most 3"),
    }
    for attempt, words in wanted.items():
        for word in words:
            assert word in by_attempt[attempt], (attempt, word, done.stdout)
    assert "rank 0,2 was stopped for it" in by_attempt[1], done.stdout
    logs = plugin.run("logs", NAME, "--attempt", "2", "--rank", "1", "--tail", "1", "--yes")
    assert (logs.returncode, logs.stdout) == (0, "last words of life 2\n"), logs.stderr
    readers = ("get", "pods", "-l", "app.kubernetes.io/name=ddpjob-evidence", "-o", "name")
    wait_for(lambda: not site.kubectl(*readers).stdout.strip(), "the readers to be deleted")
    site.delete(NAME)
