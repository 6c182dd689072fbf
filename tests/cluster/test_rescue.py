"""What dies costs no finished step: a survivor saves the newest, and no other snapshot is made."""

from collections.abc import Callable, Mapping

import pytest

from support.cluster import wait_for
from support.site import STEPS, Site, digits
from support.tiers import some_in_gate


def fail_gpu(site: Site, name: str) -> None:
    (site.volume() / f"{name}.hurry.gpu-2").touch()


FAULTS: Mapping[str, Callable[[Site, str], None]] = {
    "pod": lambda site, name: site.kill_launcher(f"{name}-1"),
    "hub": lambda site, name: site.kill_launcher(f"{name}-0"),
    "gpu": fail_gpu,
}


def saved_after(site: Site, name: str) -> int:
    """Wait until the gang has gone on; the step from which it did."""
    step = site.resumed_from(name, at_least=1)
    said = f"nothing is repeated: rank {{}} saved step {step} before it was ended"
    log = site.kubectl("logs", f"{name}-0").stdout
    assert any(said.format(rank) in log for rank in range(3)), log
    return step


@pytest.mark.fault("N3", "N13")
@pytest.mark.parametrize("fault", some_in_gate(FAULTS, "pod"))
def test_the_survivors_of_a_lost_pod_save_the_newest_step(site, finished, fault):
    name = f"rescue-{fault}"
    # Without the hub a survivor relies on the hash of the step before. It may take 1 % of a step,
    # and the first ones take longer.
    site.apply(digits(name, steps=STEPS, slow=3, every=1000))
    site.wait_running(name, 1, step=12 if fault == "hub" else 2)
    wait_for(lambda: site.status(name).get("holds"), f"{name} to be able to hold")
    reached = site.progress(name, "step")
    FAULTS[fault](site, name)
    assert saved_after(site, name) >= reached
    status = finished(name)
    restarts, failure = status["restarts"], status["lastFailure"]
    assert (restarts["total"], restarts["replaced"]) == (1, 1), status["failures"]
    assert (failure["class"] == "Hardware") == (fault == "gpu"), failure
    site.delete(name)
