"""What the operator makes of its flags."""

from __future__ import annotations

import json

import pytest

from ddpjob_operator.shell import settings

PEER = {"podSelector": {"matchLabels": {"app": "prometheus"}}}


def test_flags_win_over_the_environment() -> None:
    environ = {"POD_NAME": "a", "POD_NAMESPACE": "ns", "KUBECONFIG": "/k"}
    found = settings.parse(["--namespaces", "b, c", "--kubeconfig", "/other"], environ)
    wanted = settings.Settings(
        namespaces=("b", "c"), kubeconfig="/other", lease_namespace="ns", identity="a"
    )
    assert found == wanted
    assert settings.parse(["--metrics-from", json.dumps([PEER])], {}).metrics_from == (PEER,)


def test_what_names_no_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("{}", "[{}]", "[3]", "x"):
        with pytest.raises(SystemExit):
            settings.parse(["--metrics-from", given], {})
        assert "argument --metrics-from: " in capsys.readouterr().err
