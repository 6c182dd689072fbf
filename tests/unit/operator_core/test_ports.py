"""On the host's network ports are the node's: gangs and replicas must not take each other's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import compact_spec, observe, ports, spec
from support.world import job_object

HOST = compact_spec.template({"spec": {"hostNetwork": True, "containers": [{"name": "trainer"}]}})


def host_pod(attempt: int = 1, replica: int = 0, pod: object = None, **fields: Any) -> Any:
    body = {"hostNetwork": True, "containers": [{"name": "trainer"}], **(pod or {})}  # type: ignore[dict-item]
    obj = job_object(template={"spec": body}, **fields)
    found = render.pod(observe.job(obj), spec.parse(obj["spec"]), attempt, replica)["spec"]
    return found, {e["name"]: e["value"] for e in found["containers"][0]["env"]}


def test_a_gang_on_the_hosts_network_finds_its_names_and_declares_no_port():
    """A declared port would be one of the node's, and a second pod would fit on none."""
    body, env = host_pod()
    assert body["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "ports" not in body["containers"][0]
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"] != "29500"
    assert host_pod(pod={"dnsPolicy": "Default"})[0]["dnsPolicy"] == "Default"
    obj = job_object()
    plain = render.pod(observe.job(obj), spec.parse(obj["spec"]), 1, 0)
    assert "dnsPolicy" not in plain["spec"]


def test_all_replicas_know_the_same_master_and_hub_and_have_pages_of_their_own():
    found = [host_pod(replica=replica)[1] for replica in range(3)]
    for name in ("MASTER_PORT", contract.HUB_PORT):
        assert len({env[name] for env in found}) == 1
    assert len({env[contract.METRICS_PORT] for env in found}) == 3
    numbers = [
        {env["MASTER_PORT"], env[contract.HUB_PORT], env[contract.METRICS_PORT]} for env in found
    ]
    assert all(len(one) == 3 for one in numbers)


@pytest.mark.parametrize("master", [31000, 20001, "first", "second"])
def test_a_port_that_the_user_has_chosen_is_kept(master: int | str):
    drawn = ports.of(HOST, ports.MASTER, ports.METRICS, "u", 1, 2)
    chosen = {"first": drawn.master, "second": drawn.hub}.get(str(master), master)
    assert isinstance(chosen, int)
    found = ports.of(HOST, chosen, 9500, "u", 1, 2)
    assert (found.master, found.metrics) == (chosen, 9500)
    assert found.hub != chosen


def host_template(*declared: int) -> compact_spec.Template:
    trainer = {"name": "trainer", "ports": [{"containerPort": port} for port in declared]}
    return compact_spec.template({"spec": {"hostNetwork": True, "containers": [trainer]}})


def test_what_is_drawn_is_not_what_the_user_has_chosen_or_declared():
    free = ports.of(HOST, ports.MASTER, ports.METRICS, "u", 1, 0)
    assert ports.of(HOST, free.metrics, ports.METRICS, "u", 1, 0).metrics != free.metrics
    for number in (free.master, free.hub):
        found = ports.of(HOST, ports.MASTER, number, "u", 1, 0)
        assert number not in (found.master, found.hub)
    taken = dataclasses.astuple(free)
    found = ports.of(host_template(*taken), ports.MASTER, ports.METRICS, "u", 1, 0)
    assert not {*taken} & {*dataclasses.astuple(found)}


def test_a_template_that_declares_every_port_is_drawn_for_all_the_same():
    template = host_template(*range(20000, 30000))
    assert template.ports >= {*range(20000, 30000)}
    found = ports.of(template, ports.MASTER, ports.METRICS, "u", 1, 0)
    assert len({*dataclasses.astuple(found)}) == 3
