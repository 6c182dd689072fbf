"""One real control plane for all API tests: etcd, API server, controllers; no nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support import cluster


@pytest.fixture(scope="session")
def control_plane() -> Iterator[cluster.Cluster]:
    """A control plane with the DDPJob definition; use a namespace of your own in it."""
    name = f"t-api-{os.getpid()}"
    try:
        plane = cluster.up(name, "--nodes", "0")
        plane.apply_crd()
        yield plane
    finally:
        cluster.down(name)
