"""Read from cgroups 1 and 2 the container's OOM kills, memory limit and peak.

worker_group.py reads it when a round begins, and again after a worker or its child was killed:
SIGKILL does not name its sender. Without these files the launcher reports no OOM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
#: Events, limit and peak (2: since Linux 5.19), of version 1 and 2.
_V1: Final = ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2: Final = ("memory.events", "memory.max", "memory.peak")
_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
#: Version 1 writes "none" as the largest number of whole pages.
_UNLIMITED: Final = 2**62
#: With a peak below that share of its limit it was the node that ran out of memory.
_AT_LIMIT: Final = 0.9


@dataclass(frozen=True, slots=True)
class Memory:
    """``kills``: processes that the kernel has OOM-killed here. Sizes in bytes.

    ``limit``: the lowest of this cgroup and those above it that can be seen, None: there is none.
    ``peak``: the most that was in use under that limit, None: unknown.
    """

    kills: int
    limit: int | None
    peak: int | None


def read(root: Path = _ROOT, own: Path = _OWN) -> Memory | None:
    """Return the counters, None where there are none. ``own``: names this process's cgroup."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]
    paths = {name: path for names, path in found for name in names.split(",")}
    # Where both versions are mounted, memory belongs to the one that lists it.
    base, files = (root / "memory", _V1) if "memory" in paths else (root, _V2)
    path = Path(paths.get("memory", paths.get("", "/")).lstrip("/"))
    place = base / path
    if ".." in path.parts or not (place / files[0]).is_file():
        place = base  # a container may see its own as the root, and its path as the node has it
    kills = _kills(place / files[0])
    if kills is None:
        return None
    around = [place, *(above for above in place.parents if above.is_relative_to(base))]
    limits = [(limit, one) for one in around if (limit := _number(one / files[1])) is not None]
    limit, place = min(limits, key=lambda found: found[0], default=(None, place))
    return Memory(kills, limit, _number(place / files[2]))


def killed(before: Memory | None, now: Memory | None) -> str:
    """Explain an OOM kill between two readings, "" if there was none."""
    if before is None or now is None or now.kills <= before.kills:
        return ""
    limit = f"limit {_size(now.limit)}" if now.limit is not None else "no limit"
    peak = f"peak {_size(now.peak)}" if now.peak is not None else "peak unknown"
    what = f"out of memory ({limit}, {peak}): the kernel killed it"
    below = now.limit is None or (now.peak is not None and now.peak < _AT_LIMIT * now.limit)
    if below:
        return f"{what}, as its node had none left: raise resources.requests.memory"
    return f"{what}: raise resources.limits.memory, or have it use less"


def _kills(path: Path) -> int | None:
    """Read the line ``oom_kill N`` of the events; kernels before 4.13 have none."""
    try:
        found = _KILLS.search(path.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _number(path: Path) -> int | None:
    try:
        found = int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return found if found < _UNLIMITED else None


def _size(size: int) -> str:
    """Format a size as in a pod template."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.4g} {name}"
