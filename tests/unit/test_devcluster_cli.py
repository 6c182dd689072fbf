"""The devcluster command: one clear line for what it refuses; clusters as they are on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import binaries, cluster, network
from devcluster.cli import main, parser
from devcluster.cluster import Cluster
from devcluster.failure import Failure
from devcluster.layout import Layout


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DDPJOB_CACHE", str(tmp_path / "cache"))
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be too long for sockets
        monkeypatch.setenv("DEVCLUSTER_HOME", f"{folder}/home")
        yield Path(folder, "home")


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


def test_the_name_of_a_place_outside_the_home_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    kept = tmp_path / "kept" / "file"
    kept.parent.mkdir()
    kept.touch()
    for name in (str(kept.parent), "../kept"):
        assert main(["--name", name, "down"]) == 1
        assert "--name" in capsys.readouterr().err
    assert kept.exists()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No link of this machine counts."""
    monkeypatch.setattr(network, "index_of", lambda _: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("file", ["notes", "cluster.json"])
def test_a_directory_with_files_of_others_is_refused(home: Path, file: str) -> None:
    (home / "one").mkdir(parents=True)
    cluster.require_own(home / "one")  # empty
    (home / "one" / file).write_text("{}")
    with pytest.raises(Failure, match=r"is no cluster's"):
        cluster.require_own(home / "one")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("file", ["cluster.json", ".cluster.77"])
def test_a_directory_with_a_record_even_a_torn_one_is_ours(home: Path, file: str) -> None:
    (home / "one").mkdir(parents=True)
    (home / "one" / file).write_text('{"name": "on')
    cluster.require_own(home / "one")


@pytest.mark.usefixtures("alone")
def test_a_link_in_place_of_the_directory_is_refused(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    Cluster(Layout("one", 7, tmp_path / "far"), 3).save()
    (home / "one").symlink_to(tmp_path / "far")
    with pytest.raises(Failure, match=r"is no cluster's"):
        cluster.require_own(home / "one")


def test_the_record_outlives_what_cannot_be_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(Layout("one", 7, home / "one"), 3).save()
    (home / "one" / "log").mkdir()
    inside = sorted((home / "one").iterdir())  # the record first, in whatever order it is listed
    monkeypatch.setattr(Path, "glob", lambda *_: inside)
    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Failure, match="one/log could not be removed"):
            cluster.remove_state(home / "one")
    assert cluster.load("one") is not None
    cluster.remove_state(home / "one")
    assert list(home.iterdir()) == []  # the home itself stays, as it is not the usual one


def test_the_usual_home_goes_with_its_last_cluster(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_HOME", home)
    for name in ("one", "two"):
        Cluster(Layout(name, 7, home / name), 3).save()
    cluster.remove_state(home / "one")
    assert cluster.load("two") is not None
    cluster.remove_state(home / "two")
    assert not home.exists()


def test_mounts_at_and_below_a_directory_are_found() -> None:
    text = "\n".join(
        f"{number} 27 0:21 / {where} rw shared:1 - ext4 /dev/vda rw"
        for number, where in enumerate(["/", "/s/one", "/s/one/a\\040b", "/s/ones", "/s"])
    )
    found = cluster.mounts_below(Path("/s/one"), text)
    assert found == [Path("/s/one"), Path("/s/one/a b")]


def test_an_error_of_the_system_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(binaries, "toolbox", full)
    assert main(["build"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "No space left" in shown


def test_kubectl_reaches_the_server_past_a_proxy(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(Layout("one", 7, home / "one"), 3).save()
    seen: list[str | None] = []
    monkeypatch.setenv("NO_PROXY", "a.example")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(binaries, "ensure", lambda *_: {"kubectl": Path("/bin/kubectl")})
    names = ("NO_PROXY", "no_proxy")
    monkeypatch.setattr("os.execv", lambda *_: seen.extend(map(os.environ.get, names)))
    assert main(["--name", "one", "kubectl", "get", "nodes"]) == 0
    monkeypatch.delenv("no_proxy")
    assert seen == ["a.example,10.89.7.1", "10.89.7.1"]
