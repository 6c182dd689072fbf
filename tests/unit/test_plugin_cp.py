"""`kubectl ddp cp`: from a pod of the job or one made for it, by the very commands that it runs."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import plugin

#: What it runs in a pod is run here; a pod that it makes runs at once.
FAKE = """
case "$1 $2" in
  "get ddpjobs"*) cat "$HERE/job.json" ;;
  "get pods") cat "$HERE/pods.json" ;;
  "get pod") echo '{"metadata": {}, "spec": {}, "status": {"phase": "Running"}}' ;;
  "create "*) cat > "$HERE/created.json" ;;
  "delete pod") touch "$HERE/deleted" ;;
  "exec "*) echo "$*" > "$HERE/exec"; while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
esac
"""
Copy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Return a function: words, and the job's pods -> what `cp` did. DIR is home."""
    job = plugin.job("Succeeded")
    volume = {"persistentVolumeClaim": {"claimName": "c"}}
    job["spec"]["snapshot"] = {"path": str(tmp_path), "volume": volume}
    job["spec"]["template"] = {"spec": {"containers": [{"name": "t", "image": "i"}]}}
    (tmp_path / "j/output/deep").mkdir(parents=True)
    (tmp_path / "j/output/deep/w.bin").write_bytes(bytes(range(256)))
    (tmp_path / "j/output/log").write_text("done")

    def run(*words: str, pods: tuple[Any, ...] = ()) -> subprocess.CompletedProcess[str]:
        (tmp_path / "job.json").write_text(json.dumps(job))
        (tmp_path / "pods.json").write_text(json.dumps({"items": pods}))
        return subprocess.run(
            [sys.executable, "-m", "kubectl_ddp", "cp", *words], cwd=tmp_path, text=True,
            env=plugin.fake_kubectl(tmp_path, FAKE), capture_output=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run


def program(folder: Path, name: str, script: str) -> None:
    """Its first line apart; it is found before the machine's own."""
    (folder / name).write_text(f"#!/bin/sh\n{script}")
    (folder / name).chmod(0o755)


def files(folder: Path) -> dict[str, bytes]:
    found = (one for one in folder.rglob("*") if one.is_file())
    return {str(one.relative_to(folder)): one.read_bytes() for one in found}


def test_the_output_comes_home_from_a_pod_that_runs(copy, tmp_path):
    for _ in range(2):
        done = copy("j", "home", pods=(plugin.pod(0, 1, "terminated"), plugin.pod(1, 1)))
        assert (done.returncode, done.stderr) == (0, "home: 2 files, 0.0 MiB\n")
    assert files(tmp_path / "home") == files(tmp_path / "j/output")
    assert (tmp_path / "exec").read_text().startswith("exec -n n j-1 -c t -- sh")
    assert not (tmp_path / "created.json").exists()


@pytest.mark.parametrize(
    ("path", "name"), [("output/deep", "w.bin"), ("output/deep/w.bin", "w.bin")]
)
def test_a_path_may_be_a_folder_or_a_file(copy, tmp_path, path, name):
    assert copy(f"j:{path}", "home", pods=(plugin.pod(0, 1),)).returncode == 0
    assert files(tmp_path / "home") == {name: bytes(range(256))}


def test_without_pods_one_is_made_and_deleted_again(copy, tmp_path):
    refused = copy("j", "home")
    assert (refused.returncode, (tmp_path / "created.json").exists()) == (1, False)
    assert "then add --yes" in refused.stderr
    done = copy("j", "home", "--yes")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "home") == files(tmp_path / "j/output")
    made = json.loads((tmp_path / "created.json").read_text())
    (container,) = made["spec"]["containers"]
    mount, scratch = container["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == (str(tmp_path), True)
    assert (container["image"], scratch["mountPath"]) == ("i", "/tmp")
    assert "sizeLimit" not in json.dumps(made), "a model has any size"
    assert (tmp_path / "deleted").exists()


@pytest.mark.parametrize(("words", "says"), [
    (["j:runs", "home", "--yes"], "runs is not there; in"),
    (["j:/etc", "home", "--yes"], "/etc is not below"),
    (["j", "job.json"], "job.json: a file, where a folder is expected"),
])  # fmt: skip
def test_what_is_not_there_is_said(copy, tmp_path, words, says):
    done = copy(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr.splitlines()[-1]
    assert ("are: output" in done.stderr) == ("j:runs" in words), "what there is instead"


def test_weights_are_exported_there(copy, tmp_path):
    program(tmp_path, "ddpjob-trainer", 'echo "of $3"; echo w > "$4"\n')
    done = copy("j", "home", "--weights", pods=(plugin.pod(0, 1),))
    assert done.returncode == 0, done.stderr
    assert f"of {tmp_path}/j\n" in done.stderr
    assert files(tmp_path / "home") == {"model.safetensors": b"w\n"}


def test_nothing_is_written_outside_of_the_folder(copy, tmp_path):
    """The archive is whatever the image's tar prints."""
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for name in ("../outside", "inside"):
            archive.add(tmp_path / "j/output/log", name)
        for name, leads in (("link", "/etc"), ("newest", "inside"), ("deep/newest", "../inside")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, leads
            archive.addfile(link)
        archive.addfile(tarfile.TarInfo("link/through"))
    program(tmp_path, "tar", 'cat "$HERE/evil.tar"\n')
    done = copy("j", "home/er", pods=(plugin.pod(0, 1),))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left out: ") == 2
    assert os.listdir(tmp_path / "home") == ["er"]  # noqa: PTH208
    same = dict.fromkeys(("inside", "newest", "deep/newest"), b"done")
    assert files(tmp_path / "home/er") == {"link/through": b"", **same}
    assert not any(one.is_symlink() for one in (tmp_path / "home/er").rglob("*"))


@pytest.mark.parametrize("size", [0, 700, 1600])
def test_half_an_archive_is_no_copy(copy, tmp_path, size):
    program(tmp_path, "tar", f'/bin/tar "$@" | head -c {size}\n')
    done = copy("j", "home", pods=(plugin.pod(0, 1),))
    assert (done.returncode, "the copy broke off" in done.stderr) == (1, True)


def test_a_broken_copy_leaves_the_earlier_one(copy, tmp_path):
    pods = (plugin.pod(0, 1),)
    assert copy("j:output/deep", "home", pods=pods).returncode == 0
    program(tmp_path, "tar", '/bin/tar "$@" | head -c 1100\n')
    done = copy("j:output/deep", "home", pods=pods)
    assert (done.returncode, "the copy broke off" in done.stderr) == (1, True)
    assert files(tmp_path / "home") == {"w.bin": bytes(range(256))}


@pytest.mark.parametrize(("says", "code"), [
    ("./log: file changed as we read it", 0),
    ("./log: File removed before we read it", 0),
    ("./log: File shrank by 3 bytes; padding with zeros", 1),
])  # fmt: skip
def test_a_file_that_grows_is_a_copy_one_that_shrinks_is_none(copy, tmp_path, says, code):
    end = "./x: file changed as we read it"
    script = f'/bin/tar "$@"; printf "tar: %s\\n" "{says}" "{end}" >&2; exit 1\n'
    program(tmp_path, "tar", script)
    done = copy("j", "home", pods=(plugin.pod(0, 1),))
    assert (done.returncode, says in done.stderr) == (code, True)


def test_the_reason_of_tar_is_said(copy, tmp_path):
    end = "Exiting with failure status due to previous errors"
    script = f'printf "tar: %s\\n" "./log: Input/output error" "{end}" >&2; exit 2\n'
    program(tmp_path, "tar", script)
    done = copy("j", "home", pods=(plugin.pod(0, 1),))
    assert (done.returncode, "./log: Input/output error" in done.stderr) == (1, True)


@pytest.mark.parametrize("linked", ["log", "deep"])
def test_links_at_home_lead_nowhere_else(copy, tmp_path, linked):
    """A link at a file's place is replaced; nothing goes through one on the way."""
    (tmp_path / "home").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "else/log").write_text("mine")
    (tmp_path / "home" / linked).symlink_to(tmp_path / "else" / ("log" * (linked == "log")))
    done = copy("j", "home", pods=(plugin.pod(0, 1),))
    assert files(tmp_path / "else") == {"log": b"mine"}
    assert done.returncode == (linked == "deep")
    assert ("home/deep: a link" in done.stderr) == (linked == "deep")


def test_hostile_times_and_names_are_no_crash(copy, tmp_path):
    with tarfile.open(tmp_path / "evil.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, time in (("late", 2**70), ("n\0l", 0)):
            one = tarfile.TarInfo("x")
            one.pax_headers = {"path": name, "mtime": str(time)}
            archive.addfile(one)
    program(tmp_path, "tar", 'cat "$HERE/evil.tar"\n')
    done = copy("j", "home", pods=(plugin.pod(0, 1),))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert files(tmp_path / "home") == {"late": b""}
