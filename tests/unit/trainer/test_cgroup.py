"""Lack of memory: what the kernel tells of it, and which ends of workers it explains."""

from pathlib import Path

import pytest

from ddpjob_trainer.launcher.hub.root_cause import kind
from ddpjob_trainer.launcher.output import OutputPump
from ddpjob_trainer.launcher.processes import children
from ddpjob_trainer.launcher.processes.children import Memory, oom_killed, read_memory
from support.worker_group import make_group

GIB = 2**30
V1 = ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
V2 = ("memory.events", "memory.max", "memory.peak")
NONE_V1 = 2**63 - 4096
EVENTS = {
    V1: "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    V2: "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n",
}


def write(place: Path, names: tuple[str, ...], kills: int, *sizes: object) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (EVENTS[names].format(kills), *sizes), strict=True):
        if text is not None:
            (place / name).write_text(f"{text}\n")


@pytest.mark.fault("N5")
@pytest.mark.parametrize(
    ("own", "base", "names"),
    [
        ("0::/", ".", V2),
        # Without a namespace of its own it reads the path that its node knows.
        ("9:name=systemd:/x\n4:memory:/kubepods/pod1/c1\n3:cpu,cpuacct:/x\n0::/x", "memory", V1),
        ("4:memory:/pods/c1\n0::/pods/c1", "memory/pods/c1", V1),
        ("0::/../c2", ".", V2),  # another namespace's
        ("0::/slice/job", "slice", V2),  # the limit is that of the cgroup above
        ("4:memory:/slice/job", "memory/slice", V1),
    ],
)
def test_kills_limit_and_peak_are_read(own, base, names, tmp_path):
    (tmp_path / "own").write_text(own)
    write(tmp_path / "cgroup" / base, names, 2, 2 * GIB, GIB)
    write(tmp_path / "cgroup" / base / "job", names, 2, NONE_V1, 7)
    write(tmp_path / "c2", V2, 9, 9, 9)
    assert read_memory(tmp_path / "cgroup", tmp_path / "own") == Memory(2, 2 * GIB, GIB)


def test_no_limit_and_no_peak_are_unknown(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/\n")
    write(tmp_path, V2, 0, "max", None)
    assert read_memory(tmp_path, own) == Memory(0, None, None)
    own.write_text("4:memory:/\n")
    write(tmp_path / "memory", V1, 1, NONE_V1, 5)
    assert read_memory(tmp_path, own) == Memory(1, None, 5)


@pytest.mark.parametrize("text", [None, "", "garbage", "0::/", "4:memory:/"])
def test_where_nobody_tells_nothing_is_known(text, tmp_path):
    own = tmp_path / "own"
    if text is not None:
        own.write_text(text)
    assert read_memory(tmp_path / "none", own) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / V1[0]).write_text("under_oom 0\n")  # of a kernel that does not count
    assert read_memory(tmp_path, own) is None


FREE, LIMITED = Memory(0, None, None), Memory(1, 2 * GIB, 2 * GIB)
AT_LIMIT = "the kernel killed it: raise resources.limits.memory, or let the program use less"
OF_NODE = "the kernel killed it, as its node had none left: raise resources.requests.memory"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (Memory(0, 2 * GIB, GIB), LIMITED, f"limit 2 GiB, peak 2 GiB): {AT_LIMIT}"),
        (FREE, Memory(2, GIB * 3 // 2, None), f"limit 1.5 GiB, peak unknown): {AT_LIMIT}"),
        (FREE, Memory(1, 4 * GIB, 700 * 2**20), f"limit 4 GiB, peak 700 MiB): {OF_NODE}"),
        (FREE, Memory(1, None, None), f"no limit, peak unknown): {OF_NODE}"),
        (LIMITED, LIMITED, ""),  # by somebody else's kill
        (None, LIMITED, ""),
        (LIMITED, None, ""),
    ],
)
def test_the_words_tell_limit_peak_and_cure(before, now, words):
    assert oom_killed(before, now) == (f"out of memory ({words}" if words else "")


OF_A_LOADER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.fault("N5")
@pytest.mark.parametrize(
    ("status", "said", "grows", "named"),
    [
        (-9, "", True, "oom"),
        (137, "", True, "oom"),  # of a shell around it
        (1, OF_A_LOADER, True, "oom"),
        (-9, "", False, "signal"),  # somebody's kill
        (1, OF_A_LOADER, False, "exception"),
        (1, "ValueError: boom", True, "exception"),  # a child that was survived
        (-11, "", True, "signal"),
    ],
)
def test_an_end_is_for_lack_of_memory_if_the_kernel_has_killed(
    status, said, grows, named, tmp_path, monkeypatch
):
    found = [LIMITED, Memory(LIMITED.kills + grows, 2 * GIB, 2 * GIB)]
    monkeypatch.setattr(
        children, "read_memory", lambda: found.pop(0) if len(found) > 1 else found[0]
    )
    monkeypatch.setattr(OutputPump, "exception", lambda self, rank, crashed=False: said)
    workers, told = make_group(tmp_path)
    workers.ended(4194305, status, 1.0)
    (end,) = workers.exits
    assert (end.status, kind(end, exception=end.exception, terminated=False)) == (status, named)
    oom = "out of memory (limit 2 GiB, peak 2 GiB): the kernel killed it"
    assert end.exception.startswith(oom) is (named == "oom")
    assert said.strip() in end.exception
    assert [line.startswith(f"rank 1: {oom}") for line in told] == [True] * (named == "oom")


def test_who_was_killed_from_here_was_not_killed_by_the_kernel(tmp_path, monkeypatch):
    found = [FREE, LIMITED]
    monkeypatch.setattr(children, "read_memory", lambda: found.pop(0))
    workers, _ = make_group(tmp_path)
    workers.stop(0.0, last_words=0)
    workers.ended(4194304, -9, 1.0)
    assert not workers.exits[0].oom
