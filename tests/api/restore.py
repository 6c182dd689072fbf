"""etcd is set back to an earlier moment, as after a disaster: the data is really exchanged.

It takes a control plane of its own, which is stopped and started; as the documents say, all of
its components begin anew with the data.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from api.story import Play
from devcluster import cluster as devclusters
from devcluster import process
from support import cluster
from support.patience import PATIENCE


class Backup:
    """The data of one cluster's etcd as it was at one moment."""

    def __init__(self, name: str, folder: Path) -> None:
        found = devclusters.load(name)
        assert found is not None
        self._name, self._cluster, self._copy = name, found, folder / "etcd"
        self._data = found.layout.state / "etcd"

    def take(self) -> None:
        """Copy it while etcd stands still."""
        etcd = self._cluster.register.running("etcd")
        assert etcd is not None
        os.kill(etcd.pid, signal.SIGSTOP)
        try:
            shutil.copytree(self._data, self._copy)
        finally:
            os.kill(etcd.pid, signal.SIGCONT)

    def put_back(self) -> None:
        """Kill the control plane, exchange the data, start it again."""
        register = self._cluster.register
        running = [one for name in register.names() if (one := register.running(name))]
        assert not process.end(running, seconds=PATIENCE, polite=False)
        shutil.rmtree(self._data)
        shutil.copytree(self._copy, self._data)
        cluster.up(self._name, "--nodes", "0")


def arm(play: Play, place: str, plane: str) -> None:
    """``place``: `LATER-to-EARLIER`, both names of writes; from one to the other goes the store."""
    later, _, earlier = place.partition("-to-")
    backup = Backup(plane, play.stage.folder)
    play.outcome.deaths += 10  # the store of the past is told by no watch, and the lease is lost
    play.outcome.extra += 100

    def set_back() -> None:
        play.stage.verify()
        play.stage.history.pause()
        backup.put_back()
        proxy = play.stage.proxy
        proxy.past, proxy.made = [*proxy.past, *proxy.made], []
        play.finished.clear()
        play.stage.kubelet.trouble.clear()
        play.last = {}
        play.stage.history.begin_anew()

    play.moments[earlier] = backup.take
    play.moments[later] = lambda: play.later(0, set_back)
