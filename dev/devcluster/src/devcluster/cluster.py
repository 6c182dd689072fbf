"""One cluster as it is kept on disk: its record, its processes, its lock.

The record (cluster.json) holds what cannot be derived: the index and how many nodes there are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from devcluster import Failure, process
from devcluster.cachedir import LOCKS, Log, digest, locked, write_whole
from devcluster.layout import MAX_NODES, Layout, Node, check_name, free_index
from devcluster.node import network
from devcluster.process import Identity, Register

#: In the environment of every process of a cluster; its value is the cluster's state directory.
MARK = "DEVCLUSTER_STATE"
_HOME = Path("/var/lib/devcluster")
#: One command at a time takes an index, over all homes.
_INDICES = LOCKS / "index.lock"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Choices of one `up`; None leaves each as it is, in a new cluster at its default."""

    nodes: int | None = None
    kwok: int | None = None
    gang_scheduling: bool | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that has an index, running or not."""

    layout: Layout
    nodes: int
    kwok: int = 0
    gang_scheduling: bool = False

    @property
    def register(self) -> Register:
        """Return the records of its processes."""
        return Register(self.layout.state / "process")

    @property
    def members(self) -> list[Node]:
        """Return its nodes."""
        return [self.layout.node(number) for number in range(1, self.nodes + 1)]

    def log_of(self, component: str) -> Path:
        """Return a component's log file."""
        return self.layout.logs / f"{component}.log"

    def save(self) -> None:
        """Write the record, whole or not at all."""
        state = self.layout.state
        state.mkdir(parents=True, exist_ok=True)
        record = {"name": self.layout.name, "index": self.layout.index}
        record |= {"nodes": self.nodes, "kwok": self.kwok, "gang_scheduling": self.gang_scheduling}
        write_whole(state / "cluster.json", json.dumps(record))

    def changed(self, wanted: Wanted) -> Cluster:
        """Return the cluster as asked for; its nodes never become fewer."""
        if wanted.nodes is not None and wanted.nodes < self.nodes:
            raise Failure(
                f"--nodes {wanted.nodes}: cluster {self.layout.name} has {self.nodes} already;"
                f" run `devcluster --name {self.layout.name} down` first"
            )
        return replace(
            self, **{key: value for key, value in asdict(wanted).items() if value is not None}
        )

    def ensure_process(
        self, component: str, argv: Sequence[str | Path], configuration: str = ""
    ) -> bool:
        """Start a host process unless it runs just so; True when it was started."""
        words = [str(word) for word in argv]
        spec = digest(*words, configuration)
        identity = self.register.running(component)
        if identity is not None:
            if identity.spec == spec:
                return False
            process.end([identity])
        mark = {MARK: str(self.layout.state)}
        pid = process.start(words, self.log_of(component), mark)
        self.record(component, pid, spec)
        return True

    def record(self, component: str, pid: int, spec: str) -> Identity:
        """Record a process that was just started."""
        identity = process.identify(pid, spec)
        if identity is None:
            raise Failure(
                f"{component} ended at once: {process.last_lines(self.log_of(component))}"
            )
        self.register.write(component, identity)
        return identity


def home() -> Path:
    """Return where clusters are kept: $DEVCLUSTER_HOME, else /var/lib/devcluster."""
    return Path(os.environ.get("DEVCLUSTER_HOME") or _HOME).resolve()


def load(name: str) -> Cluster | None:
    """Return a cluster, None when there is none of that name."""
    check_name(name, home())
    state = home() / name
    try:
        record = json.loads((state / "cluster.json").read_text())
        layout = Layout(name, int(record["index"]), state)
        gangs = bool(record.get("gang_scheduling"))  # absent from records of older versions
        return Cluster(layout, int(record["nodes"]), int(record["kwok"]), gangs)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError) as error:
        raise Failure(f"{state}/cluster.json is damaged ({error}): remove {state}") from error


def require(name: str) -> Cluster:
    """Return a cluster; Failure when there is none of that name."""
    found = load(name)
    if found is None:
        raise Failure(f"there is no cluster {name}: run `devcluster --name {name} up`")
    return found


def names() -> list[str]:
    """Return the names of all clusters of this home."""
    return sorted(path.parent.name for path in home().glob("*/cluster.json"))


@contextmanager
def hold(name: str, log: Log) -> Iterator[None]:
    """Let one command at a time change a cluster; refuse a name unfit for one."""
    check_name(name, home())
    with locked(LOCKS / f"{name}-{digest(str(home() / name))}.lock", log):
        yield


def obtain(name: str, wanted: Wanted, log: Log) -> Cluster:
    """Return the cluster to bring up, new or old, with its bridge in place."""
    if wanted.nodes is not None and not 0 <= wanted.nodes <= MAX_NODES:
        raise Failure(f"--nodes {wanted.nodes}: give 0 (control plane only) to {MAX_NODES}")
    found = load(name)
    if found is not None:
        with locked(_INDICES, log):
            claimed = network.claim_bridge(found.layout)
        if not claimed:
            raise Failure(
                f"another cluster has taken {found.layout.bridge} since cluster {name} was made:"
                f" run `devcluster --name {name} down`, then `up` again"
            )
        cluster = found.changed(wanted)
    else:
        require_own(home() / name)
        cluster = _allocate(name, wanted, log)
    cluster.save()
    return cluster


def _allocate(name: str, wanted: Wanted, log: Log) -> Cluster:
    with locked(_INDICES, log):
        taken = {other.layout.index for one in names() if (other := load(one)) is not None}
        while True:
            index = free_index(taken, network.routes())
            cluster = Cluster(Layout(name, index, home() / name), 0).changed(wanted)
            cluster.save()  # first, so that `down` finds the bridge whatever happens next
            if network.claim_bridge(cluster.layout):
                return cluster
            taken.add(index)


def strays(state: Path) -> list[Identity]:
    """Return processes that carry a cluster's mark, recorded or not."""
    wanted = f"{MARK}={state}".encode()
    found: list[Identity] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        identity = process.identify(int(entry.name)) if wanted in variables else None
        if identity is not None:
            found.append(identity)
    return found


def require_own(state: Path) -> None:
    """Refuse a directory that holds files and was not made by devcluster."""
    if not state.is_symlink():
        if not state.exists() or (state.is_dir() and not any(state.iterdir())):
            return
        bridged = network.index_of(state) is not None
        if state.is_dir() and (_is_recorded(state) or bridged or strays(state)):
            return
    raise Failure(
        f"{state} is there and is no cluster's, so devcluster neither uses nor removes it:"
        " move it away, or give another --name or DEVCLUSTER_HOME"
    )


def _is_recorded(state: Path) -> bool:
    """Tell whether a directory holds a cluster's record: whole, torn, or not yet renamed."""
    try:
        record = json.loads((state / "cluster.json").read_text())
    except OSError:
        return any(state.glob(".cluster.*"))
    except ValueError:
        return True
    return isinstance(record, dict) and "index" in record


def require_no_mounts(state: Path) -> None:
    """Refuse to remove a directory with something mounted at or below it.

    The nodes' own mounts lie in other namespaces, so what this sees is somebody else's.
    """
    found = mounts_below(state, Path("/proc/self/mountinfo").read_text())
    if found:
        raise Failure(
            f"{found[0]} is a mount, and what it holds would be removed with the cluster:"
            f" run `umount {found[0]}` first"
        )


def mounts_below(state: Path, mountinfo: str) -> list[Path]:
    """Return the mount points at or below a directory, from the text of /proc/self/mountinfo."""
    found: list[Path] = []
    for line in mountinfo.splitlines():
        escaped = line.split()[4]
        plain = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), escaped)
        if Path(plain).is_relative_to(state):
            found.append(Path(plain))
    return found


def remove_state(state: Path) -> None:
    """Remove a cluster's files, its record last; and the usual home once empty."""
    record = state / "cluster.json"
    left = [path for path in state.glob("*") if path != record] if state.is_dir() else []
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if path.exists():
            raise Failure(f"{path} could not be removed wholly: look for what uses it")
    record.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        state.rmdir()
    if state.parent == _HOME:
        with suppress(OSError):
            _HOME.rmdir()
