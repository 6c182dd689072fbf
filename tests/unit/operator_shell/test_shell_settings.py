"""What the operator makes of its flags."""

from __future__ import annotations

import json

import pytest

from ddpjob_operator.shell import settings

LABELS = {"matchLabels": {"app": "prometheus"}}
EXISTS = {"key": "team", "operator": "Exists"}


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"podSelector": LABELS}, {"podSelector": LABELS}),
        ({"namespaceSelector": {}}, {"namespaceSelector": {}}),
        ({"namespaceSelector": {"matchLabels": {}}}, {"namespaceSelector": {}}),
        ({"podSelector": {"matchExpressions": [], **LABELS}}, {"podSelector": LABELS}),
        (
            {"podSelector": {"matchExpressions": [{**EXISTS, "values": []}]}},
            {"podSelector": {"matchExpressions": [EXISTS]}},
        ),
        ({"podSelector": LABELS, "namespaceSelector": None}, {"podSelector": LABELS}),
        ({"ipBlock": {"cidr": "10.0.0.0/8", "except": []}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}),
    ],
)
def test_peers_are_as_the_api_server_stores_them(given: object, stored: object) -> None:
    """Else each look at a NetworkPolicy finds it changed, writes it again and says so."""
    found = settings.parse(["--metrics-from", json.dumps([given])], {})
    assert found.metrics_from == (stored,)


@pytest.mark.parametrize("given", ["{}", "[{}]", '[{"ipBlock": {}}]', "[3]", "x"])
def test_what_names_no_peer_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(["--metrics-from", given], {})
    assert "argument --metrics-from: " in capsys.readouterr().err
