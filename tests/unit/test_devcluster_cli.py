"""The devcluster command: one clear line for what it refuses; clusters as they are on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster import cluster
from devcluster.cli import main, parser
from devcluster.cluster import Cluster
from devcluster.failure import Failure
from devcluster.layout import Layout


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEVCLUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DDPJOB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    "words", [["status"], ["kubeconfig"], ["kubectl", "get", "nodes"], ["load", "an-image"]]
)
def test_a_command_for_no_cluster_says_how_to_make_one(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert main(["--name", "nobody", *words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "`devcluster --name nobody up`" in shown.err


@pytest.mark.parametrize("words", [["up"], ["down"], ["node", "stop", "1"]])
def test_who_is_not_root_is_told(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def went_on(*_: object) -> None:
        raise AssertionError("it went on")

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for step in ("host.require_space", "cluster.hold", "cluster.require"):
        monkeypatch.setattr(f"devcluster.{step}", went_on)
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("devcluster: devcluster needs root")


def test_the_name_is_dev_unless_given() -> None:
    assert parser().parse_args(["up"]).name == "dev"
    given = parser().parse_args(["--name", "x", "up", "--image", "a", "--image", "b"])
    assert (given.name, given.image, given.nodes) == ("x", ["a", "b"], None)


def test_a_cluster_is_read_back_as_saved(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Cluster(Layout("one", 7, home / "one"), 3, 5)
    made.save()
    assert cluster.load("one") == made
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "one\n"


def test_a_damaged_record_names_the_file(home: Path) -> None:
    Cluster(Layout("one", 7, home / "one"), 3).save()
    (home / "one" / "cluster.json").write_text("{}")
    with pytest.raises(Failure, match=r"one/cluster\.json is damaged"):
        cluster.load("one")


def test_a_cluster_grows_and_does_not_shrink(home: Path) -> None:
    made = Cluster(Layout("one", 0, home / "one"), 2, 4)
    assert made.grown(None, None) == made
    assert made.grown(3, 0).nodes == 3
    assert made.grown(3, 0).kwok == 0
    with pytest.raises(Failure, match=r"--nodes 1: .*down"):
        made.grown(1, None)
