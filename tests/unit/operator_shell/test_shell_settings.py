"""What the operator makes of its flags."""

import json

import pytest

from ddpjob_operator import settings
from ddpjob_operator.core.objects.nodes import Signals

LABELS = {"matchLabels": {"app": "prometheus"}}
PEER = {"podSelector": LABELS}


def test_flags_win_over_the_environment():
    environ = {"POD_NAME": "a", "POD_NAMESPACE": "ns", "KUBECONFIG": "/k"}
    found = settings.parse(["--namespaces", "b, c", "--kubeconfig", "/other"], environ)
    wanted = settings.Settings(
        namespaces=("b", "c"), kubeconfig="/other", lease_namespace="ns", identity="a"
    )
    assert found == wanted
    assert settings.parse(["--metrics-from", json.dumps([PEER])], {}).metrics_from == (PEER,)


def test_signals_of_nodes_are_json(capsys):
    given = {"conditions": ["KernelDeadlock"], "taints": [], "cordon": True}
    found = settings.parse(["--node-signals", json.dumps(given)], {}).node_signals
    assert found == Signals(("KernelDeadlock",), (), cordon=True)
    assert settings.parse([], {}).node_signals == Signals()
    with pytest.raises(SystemExit):
        settings.parse(["--node-signals", "x"], {})
    assert "argument --node-signals: no JSON" in capsys.readouterr().err


def test_peers_are_as_the_api_server_stores_them():
    """Else each look at a NetworkPolicy finds it changed, writes it again and says so."""
    for given, stored in (
        ({"namespaceSelector": {"matchLabels": {}}}, {"namespaceSelector": {}}),
        ({"podSelector": {"matchExpressions": [], **LABELS}, "namespaceSelector": None}, PEER),
        ({"ipBlock": {"cidr": "10.0.0.0/8", "except": []}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}),
    ):
        found = settings.parse(["--metrics-from", json.dumps([given])], {})
        assert found.metrics_from == (stored,)


def test_what_names_no_peer_is_refused(capsys):
    for given in ("{}", "[{}]", '[{"ipBlock": {}}]', "[3]", "x"):
        with pytest.raises(SystemExit):
            settings.parse(["--metrics-from", given], {})
        assert "argument --metrics-from: " in capsys.readouterr().err
