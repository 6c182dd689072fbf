"""etcd goes back to what it held minutes ago: jobs, pods and statuses since then are forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chronicle import Chronicle
from support.cluster import wait_for
from support.plane import Plane, is_first, processes_with
from support.site import STEPS, Finished, Site, digits, job

pytestmark = pytest.mark.tier("all")


def gangs_of(site: Site, name: str) -> set[str]:
    """Attempts of which a launcher runs, as the machine has it."""
    here = {"DDPJOB_NAMESPACE": site.namespace, "DDPJOB_NAME": name}
    found = set()
    for pid in filter(is_first, processes_with(**here)):
        try:
            words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:
            continue  # it has ended meanwhile
        found |= {word for word in words if word.startswith("DDPJOB_ATTEMPT=")}
    return found


@pytest.mark.fault("A7")
def test_a_restored_etcd_loses_no_gang_and_doubles_none(
    site: Site, finished: Finished, chronicle: Chronicle, tmp_path: Path
) -> None:
    """One job was there before, one in an earlier attempt, one had ended, one did not exist."""
    plane, again, later, over = Plane(site.cluster), "restored", "forgotten", "long-over"
    site.apply(job(over, ["true"]))
    ended = site.wait_phase(over, "Succeeded")
    site.apply(digits(again, steps=STEPS, slow=4, every=2))
    site.wait_running(again, 1, snapshot_after=0)
    plane.save_store(tmp_path / "etcd")
    site.kubectl("delete", "pod", f"{again}-1", "--grace-period=0", "--force", check=True)
    unknown = digits(later, steps=STEPS, slow=4, every=2)
    site.apply(unknown)
    reached = site.wait_running(again, 2, snapshot_after=0)["progress"]["snapshotStep"]
    site.wait_running(later, 1, snapshot_after=0)
    assert chronicle.violations() == []

    plane.restore_store(tmp_path / "etcd")
    plane.repair()
    chronicle.begin_anew()

    wait_for(lambda: not gangs_of(site, later), "pods that nobody knows to go")
    after = site.wait_running(again, 2, snapshot_after=reached)
    assert after["attempt"] > 1
    wait_for(lambda: len(gangs_of(site, again)) == 1, "one gang")
    assert site.status(over) == ended
    site.apply(unknown)  # as its user would
    for name in (again, later):
        finished(name)
    for name in (again, later, over):
        site.delete(name)
