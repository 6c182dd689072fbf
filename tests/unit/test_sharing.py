"""Who runs which file, and what the workers of a run have in common."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import sharing
from support.cluster import ROOT

NODES, STORE = (f"tests/cluster/disruptive/test_{name}.py" for name in ("nodes", "store"))
LONG, SHORT, NEW = (f"tests/api/test_{name}.py" for name in ("long", "short", "new"))


@dataclass
class Item:
    nodeid: str


def in_order(seconds: dict[str, float], *nodeids: str) -> list[str]:
    items = [Item(nodeid) for nodeid in nodeids]
    sharing.longest_first(items, seconds)  # type: ignore[arg-type]
    return [item.nodeid for item in items]


def test_the_longest_file_is_first_and_its_tests_keep_their_order() -> None:
    given = (f"{NEW}::a", f"{SHORT}::b", f"{SHORT}::a", f"{LONG}::z", f"{LONG}::a")
    seconds = {given[1]: 2.0, given[2]: 2.0, given[3]: 3.0, given[4]: 3.0}
    assert in_order(seconds, *given) == [given[3], given[4], given[1], given[2], given[0]]


def test_what_is_not_run_counts_for_nothing() -> None:
    given = (f"{SHORT}::a", f"{LONG}::a")
    assert in_order({f"{LONG}::z": 9.0, f"{SHORT}::a": 1.0}, *given) == [*given]


def test_what_disrupts_a_cluster_is_one_piece_of_work() -> None:
    given = (f"{NODES}::a", f"{LONG}::a", f"{STORE}::a")
    seconds = dict(zip(given, (3.0, 5.0, 3.0), strict=True))
    assert in_order(seconds, *given) == [given[0], given[2], given[1]]
    assert sharing.scope_of(given[0]) == sharing.scope_of(given[2]) == sharing.DISRUPTIVE


def test_a_third_gang_waits_as_long_as_there_is_anything_else() -> None:
    trainer = [f"tests/trainer/test_{n}.py" for n in range(4)]
    assert sharing.next_scope([trainer[2], LONG], trainer[:1]) == trainer[2]
    assert sharing.next_scope([trainer[2], LONG], trainer[:2]) == LONG
    assert sharing.next_scope([trainer[2], trainer[3]], trainer[:2]) == trainer[2]
    assert (
        sharing.next_scope([sharing.DISRUPTIVE, LONG], [*trainer[:2], LONG]) == sharing.DISRUPTIVE
    )


def test_what_is_shared_is_made_once(tmp_path: Path) -> None:
    shared, made = sharing.Shared(tmp_path), []

    def make() -> dict[str, int]:
        made.append(1)
        return {"number": len(made)}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: shared.once("it", make), range(8)))
    assert found == [{"number": 1}] * 8


def test_what_could_not_be_made_is_tried_again(tmp_path: Path) -> None:
    shared = sharing.Shared(tmp_path)
    with pytest.raises(ZeroDivisionError):
        shared.once("it", lambda: 1 / 0)
    assert shared.once("it", lambda: "made") == "made"


@pytest.mark.tier("gate")
def test_every_worker_has_what_the_first_made_and_all_of_it_is_run(tmp_path: Path) -> None:
    """By pytest-xdist itself: three workers, two levels, a file of which each sees the same."""
    for level in ("api", "trainer", "unit"):
        for name in ("a", "b"):
            file = tmp_path / f"tests/{level}/test_{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                "import os\n"
                "def test_one(shared):\n"
                "    with open('pids', 'a') as seen:\n"
                "        seen.write(f\"{shared.once('pid', os.getpid)} \")\n"
                "def test_two(shared): shared.at_end('none-of-this-name')\n"
            )
    (tmp_path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n3", "-v", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "DDPJOB_KEEP_CLUSTER": "1",
             "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'devcluster/src'}"},
    )  # fmt: skip
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    workers = {line.split("]")[0] for line in done.stdout.splitlines() if "PASSED" in line}
    assert len(workers) == 3, done.stdout
    seen = (tmp_path / "pids").read_text().split()
    assert (len(seen), len(set(seen))) == (6, 1), seen


def test_of_a_worker_that_dies_only_what_is_left_is_run_again() -> None:
    """A file that it has finished would hold up whoever gets it: there is no test to wait for."""
    scheduler = sharing.ByFile.__new__(sharing.ByFile)
    scheduler.workqueue = OrderedDict()
    done, left = {f"{SHORT}::a": True}, {f"{LONG}::a": True, f"{LONG}::b": False}
    scheduler.assigned_work = {"dead": {SHORT: done, LONG: left}}  # type: ignore[dict-item]
    assert scheduler.remove_node("dead") == f"{LONG}::b"  # type: ignore[arg-type]
    assert scheduler.workqueue == {LONG: left}
