"""Kueue's Workload as data: parsed whatever is in it, written without losing what others wrote."""

from datetime import timedelta
from typing import Any

import pytest

from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, workload
from ddpjob_operator.core.objects import spec as spec_
from ddpjob_operator.core.objects.workload import Condition, Placement
from support import workloads
from support.world import START, job_object, rendered


def made(**meta: Any) -> dict[str, Any]:
    job = job_object()
    job["metadata"] |= {"labels": {workloads.QUEUE: "team"}, **meta}
    seen = observe.job(job)
    body = render.workload(seen, spec_.parse(job["spec"]), "hash 3+0")
    body["metadata"] |= {"uid": "wl", "resourceVersion": "7"}
    return body


def test_what_was_rendered_is_read_back():
    found = workload.workload(made())
    assert (found.queue, found.made_of, found.version) == ("team", "hash 3+0", "7")
    assert found.owner_uid == job_object()["metadata"]["uid"]
    assert (found.active, found.reserved, found.deleting) == (True, False, False)


@pytest.mark.parametrize("name", ["job", "a" * 63, "a.b-" * 15])
def test_its_name_is_a_labels_value_and_that_of_no_other_job(name):
    found = made(name=name)["metadata"]["name"]
    assert len(found) <= 63
    assert not {"-", "."} & {found.rpartition("-")[0][-1]}
    assert found != made(name=name, uid="another")["metadata"]["name"]


def test_an_admission_is_named_unlike_the_next_one():
    first = workload.workload(workloads.admit(made(), START)).admission
    second = made()
    workloads.admit(second, START + timedelta(seconds=1))
    assert workload.workload(second).admission != first


STRANGE = [None, [], {}, "x", 1, [None], [{"type": 1}], {"a": 1}, [[]], [{"name": "trainer"}]]


@pytest.mark.parametrize("strange", STRANGE, ids=repr)
@pytest.mark.parametrize(
    "field", ["conditions", "admission", "admissionChecks", "reclaimablePods", "podSetAssignments"]
)
def test_a_strange_status_is_read_as_nothing(strange, field):
    body = made()
    where = {"podSetAssignments": strange}
    body["status"] = {"admission": where} if field == "podSetAssignments" else {field: strange}
    found = workload.workload(body)
    assert (found.reserved, found.flavors, found.reclaimed) == (False, (), 0)
    body["status"] = strange
    assert workload.workload(body).conditions == {}
    body["spec"] = strange
    assert workload.workload(body).queue == ""


def test_words_of_a_stranger_are_bounded_and_escaped():
    body = workloads.pending(made(), START, "\x1b[31m" + "x" * 5000)
    said = workload.workload(body).said("QuotaReserved").message
    assert len(said) <= 600
    assert "\x1b" not in said


TEMPLATE = {
    "metadata": {"labels": {"l": "1"}, "annotations": {"a": "1"}},
    "spec": {"nodeSelector": {"n": "1"}},
}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([Placement(labels={"l": "1", "m": "2"})], ""),
        ([Placement(labels={"l": "2"})], "labels: l is to be 2, and is 1"),
        ([Placement(annotations={"a": "2"})], "annotations: a"),
        ([Placement(node_selector={"n": "2"})], "nodeSelector: n"),
        ([Placement(labels={"m": "1"}), Placement(labels={"m": "2"})], "labels: m"),
        ([Placement(node_selector={"m": "1"}), Placement(node_selector={"m": "1"})], ""),
    ],
)
def test_another_value_under_a_key_is_a_conflict(asked, words):
    found = workload.placed(TEMPLATE, asked)
    assert isinstance(found, str) == bool(words)
    assert not words or (isinstance(found, str) and words in found)


def test_a_toleration_of_two_flavours_is_there_once():
    one = {"key": "spot", "operator": "Exists"}
    found = workload.placed(TEMPLATE, [Placement(tolerations=(one,))] * 2)
    assert isinstance(found, dict)
    assert found["spec"]["tolerations"] == [one]
    assert "tolerations" not in TEMPLATE["spec"], "the template itself stays"


def test_a_pod_keeps_what_the_template_asks_beside_the_placement():
    placement = Placement({"l": "1"}, {"a": "1"}, {"n": "1"}, ({"key": "k"},))
    job = job_object()
    job["spec"]["template"]["metadata"] = {"labels": {"mine": "1", workloads.QUEUE: "team"}}
    job["spec"]["template"]["spec"] |= {"nodeSelector": {"zone": "a"}}
    job["spec"]["template"]["spec"]["tolerations"] = [{"key": "own", "operator": "Exists"}]
    spec = spec_.parse(job["spec"])
    pod = render.pod(observe.job(job), spec, 1, 0, placements=(placement,))
    assert pod["spec"]["nodeSelector"] == {"zone": "a", "n": "1"}
    assert {"key": "k"} in pod["spec"]["tolerations"]
    assert {"key": "own", "operator": "Exists"} in pod["spec"]["tolerations"]
    assert pod["metadata"]["labels"].items() >= {"l": "1", "mine": "1"}.items()
    assert pod["metadata"]["annotations"]["a"] == "1"
    assert workloads.QUEUE not in pod["metadata"]["labels"]
    assert "nodeSelector" not in rendered()["spec"]


def test_a_write_keeps_what_others_wrote_and_times_of_unchanged_conditions():
    body = workloads.admit(made(), START)
    body["status"]["schedulingStats"] = {"evictions": []}
    told = {"Admitted": Condition(False, "NoReservation", "words", "")}
    later = START + timedelta(seconds=60)
    new = workload.with_status(body, told, later, reclaimed=None, give_back=True)
    assert new["status"]["schedulingStats"] == {"evictions": []}
    assert "admission" not in new["status"]
    assert workloads.condition(new, "Admitted")["lastTransitionTime"] == workloads.stamp(later)
    assert workloads.true(new, "QuotaReserved")
    again = workload.with_status(new, told, later + timedelta(days=1), reclaimed=2, give_back=False)
    assert workloads.condition(again, "Admitted")["lastTransitionTime"] == workloads.stamp(later)
    assert again["status"]["reclaimablePods"] == [{"name": "trainer", "count": 2}]
    assert workloads.true(body, "Admitted")
