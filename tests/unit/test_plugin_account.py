"""kubectl ddp account: the table of a job's pod-hours, whatever a status holds."""

from datetime import UTC, datetime
from typing import Any

import pytest

from kubectl_ddp.commands import account
from kubectl_ddp.gang import Job
from kubectl_ddp.kubectl import Failure

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
LEDGER = {
    "since": "2026-11-28T09:00:00.000000Z",
    "until": "2026-11-28T11:59:48.000000Z",
    "podSeconds": {"productive": 30_000, "recovering": 2000, "waiting": 400, "held": 1},
    "recovering": {"User": 500, "Disruption": 1500},
}


def job(phase: str = "Running", limits: dict[str, str] | None = None, **status: Any) -> Job:
    containers = [{"name": "side"}, {"name": "trainer", "resources": {"limits": limits or {}}}]
    return Job(
        {
            "metadata": {"name": "j", "namespace": "n", "uid": "u"},
            "spec": {"replicas": 3, "template": {"spec": {"containers": containers}}},
            "status": {"phase": phase, **status},
        }
    )


def test_the_table_has_states_by_kind_and_causes_by_size():
    eta = {"at": "2026-11-28T14:05:00Z", "remaining": "2h5m"}
    limits = {"nvidia.com/gpu": "8", "cpu": "4"}
    lines = account.lines(job(limits=limits, ledger=LEDGER, goodput=0.9375, eta=eta), NOW)
    text = "\n".join(lines)
    assert "3, 9.0 h of pods in all, 72.0 h of GPUs" in text
    assert "Goodput:   93.8%" in text
    assert "; the last 12s follow" in text
    assert "Ends:      about 2026-11-28 14:05 UTC, if it fails" in text
    rows = [line.split()[:3] for line in lines[lines.index("") + 2 :]]
    assert rows == [
        ["productive", "8.3", "h"],
        ["recovering", "33m", "6.2%"],
        ["Disruption", "25m", "4.6%"],
        ["User", "8m20s", "1.5%"],
        ["waiting", "6m40s", "1.2%"],
    ], "what is next to nothing has no line"


def test_what_nobody_knows_is_said_with_its_cure():
    ledger = {**LEDGER, "podSeconds": {"unknown": 90.0, "starting": 10.0}, "recovering": {}}
    text = "\n".join(account.lines(job("Succeeded", ledger=ledger, goodput=0), NOW))
    assert "Unknown:   90.0%: no steps were reported" in text
    assert "follow" not in text, "a job that has ended is booked to its end"


@pytest.mark.parametrize("ledger", [None, {}, {"podSeconds": "x"}])
def test_without_a_ledger_it_says_why(ledger):
    with pytest.raises(Failure, match=r"no ledger yet: .* upgrade the chart"):
        account.lines(job(ledger=ledger), NOW)


def test_a_job_without_pods_so_far_is_no_old_operators():
    with pytest.raises(Failure, match="Suspended and has had no pods yet"):
        account.lines(job("Suspended", ledger={**LEDGER, "podSeconds": {}}), NOW)


def test_a_template_that_nobody_can_read_breaks_no_table():
    for limits in ({"nvidia.com/gpu": "9" * 5000}, {"nvidia.com/gpu": "8k"}):
        assert "GPUs" not in "\n".join(account.lines(job(limits=limits, ledger=LEDGER), NOW))
    found = job(ledger=LEDGER)
    found.obj["spec"]["template"] = {}
    assert "productive" in "\n".join(account.lines(found, NOW))
