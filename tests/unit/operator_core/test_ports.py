"""On the host's network ports are the node's: gangs and replicas must not take each other's."""

import dataclasses
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_operator.core.objects import compact_spec, ports
from support.world import env_of, rendered

HOST = compact_spec.template({"spec": {"hostNetwork": True, "containers": [{"name": "trainer"}]}})


def host_pod(replica: int = 0, **pod: object) -> dict[str, Any]:
    body = {"hostNetwork": True, "containers": [{"name": "trainer"}], **pod}
    return rendered(replica=replica, template={"spec": body})


def test_a_gang_on_the_hosts_network_finds_its_names_and_declares_no_port():
    """A declared port would be one of the node's, and a second pod would fit on none."""
    pod = host_pod()
    env = env_of(pod)
    assert pod["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "ports" not in pod["spec"]["containers"][0]
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"] != "29500"
    assert host_pod(dnsPolicy="Default")["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in rendered()["spec"]


def test_all_replicas_know_one_master_and_hub_and_have_own_pages():
    names = ("MASTER_PORT", contract.HUB_PORT, contract.METRICS_PORT)
    found = [[env_of(host_pod(replica))[name] for name in names] for replica in range(3)]
    assert [len({*column}) for column in zip(*found, strict=True)] == [1, 1, 3]
    assert all(len({*row}) == 3 for row in found)


@pytest.mark.parametrize("master", [31000, 20001, "first", "second"])
def test_a_port_that_the_user_has_chosen_is_kept(master):
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
