"""The tests' own client leaves nothing of a kubeconfig behind."""

from __future__ import annotations

import base64
import ssl
import tempfile
from pathlib import Path

import pytest
import yaml

from support.rest import Rest


def test_no_key_of_a_kubeconfig_stays_in_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    inline = base64.b64encode(b"no certificate").decode()
    cluster = {"server": "https://localhost"}  # the system's authorities: the key is reached
    user = {"client-certificate-data": inline, "client-key-data": inline}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "one",
                "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
                "clusters": [{"name": "one", "cluster": cluster}],
                "users": [{"name": "one", "user": user}],
            }
        )
    )
    with pytest.raises(ssl.SSLError):
        Rest(kubeconfig)
    assert not list(temporary.iterdir())
