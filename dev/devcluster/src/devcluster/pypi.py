"""The host's way to its Python package index, for uv and image builds.

uv does not read pip's configuration. A host behind a mirror or with its own certificates has set up
pip, so pip's settings (files and PIP_* variables) are passed on here as environment variables; the
user's settings for uv itself win.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

#: pip's setting -> uv's variable.
_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "HTTPS_PROXY",
}
#: Settings of uv itself that hold on other machines too.
UV_INDEX_VARIABLES = frozenset({"UV_DEFAULT_INDEX", "UV_INDEX", "UV_INSECURE_HOST"})
_ENVIRONMENT_SECTION = ":env:"


def pip_settings(python: str = sys.executable) -> dict[str, str]:
    """Return pip's effective settings by bare name; empty when this Python has no pip."""
    shown = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return parse_pip_settings(shown.stdout) if shown.returncode == 0 else {}


def parse_pip_settings(listing: str) -> dict[str, str]:
    """Parse `pip config list`, lines of section.name='value'; a PIP_* variable beats a file.

    Only the sections that hold for `pip install` count.
    """
    ranks = {"global": 0, "install": 1, _ENVIRONMENT_SECTION: 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, separator, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        rank = ranks.get(section)
        if not separator or rank is None:
            continue
        if name not in found or found[name][0] <= rank:
            found[name] = (rank, " ".join(str(ast.literal_eval(quoted)).split()))
    return {name: value for name, (_, value) in found.items()}


def reachable_from_elsewhere(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings without directories of this host, which a container does not see."""
    kept = dict(settings)
    links = [link for link in kept.pop("find-links", "").split() if link.startswith("http")]
    if links:
        kept["find-links"] = " ".join(links)
    return kept


def uv_environment(
    settings: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that make uv reach the index as pip does; none already set."""
    found: dict[str, str] = {}
    for name, variable in _SETTINGS.items():
        value = settings.get(name, "")
        if value and variable not in environ:
            found[variable] = value
    return found


def pip_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make another pip reach the index as this host's does."""
    return {
        f"PIP_{name.upper().replace('-', '_')}": settings[name]
        for name in _SETTINGS
        if name in settings and name != "default-timeout"
    }
