"""`kubectl ddp run`: what it creates, in which order, and how it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kubectl_ddp import cli, gang, reader
from kubectl_ddp.commands import logs
from kubectl_ddp.kubectl import Failure, Kubectl
from kubectl_ddp.script import manifest, upload
from support import plugin

PVC = "pvc train-snapshots"


class Server:
    """Stands in for kubectl: what is there, what came, and what is refused."""

    def __init__(self, *there: str, phases: tuple[str, ...] = ("Running", "Succeeded")) -> None:
        self.there, self.phases, self.refuses = there, list(phases), ""
        self.interrupts, self.loses, self.foreign, self.config_map = "", "", False, {}
        self.said: list[str] = []
        self.made: dict[str, Any] = {}

    def read(self, verb: str, *words: str, given: str | None = None) -> str:
        if verb == "get":
            kind, name = words[0].partition(".")[0], words[1]
            if kind == "configmap":
                return json.dumps(self.config_map) if self.config_map else ""
            if words[2] == "--ignore-not-found" and "DDPJob" in self.made:
                return json.dumps(self.job(""))
            if words[2] == "--ignore-not-found":
                return '{"metadata": {}}' if f"{kind} {name}" in self.there else ""
            return json.dumps(self.job(self.phases.pop(0)))
        body = json.loads(given or "{}")
        what = f"{verb} {body.get('kind') or words[0].partition('.')[0]}"
        self.said.append(what)
        if what == self.refuses or (what == "create ConfigMap" and self.config_map):
            raise Failure(f"you may not {what}")
        if what == "delete configmap":
            self.config_map = {}
        self.made[body.get("kind", "")] = body
        if what == self.interrupts:
            raise KeyboardInterrupt
        if what == self.loses:
            raise Failure("unexpected EOF")
        return json.dumps(self.job("") if "DDPJob" in self.made else {})

    def job(self, phase: str) -> dict[str, Any]:
        found = plugin.job(phase, version=len(self.phases))
        found["metadata"] |= self.made["DDPJob"]["metadata"]
        if self.foreign:
            del found["metadata"]["annotations"]
        return found


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function: a server and options of `run train.py` -> exit code."""
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gang, "_PAUSE", 0.0)
    monkeypatch.setattr(gang, "find_members", lambda *_: {})

    def code(server: Server, *words: str) -> int:
        monkeypatch.setattr(Kubectl, "read", lambda _, *words, **more: server.read(*words, **more))
        return cli.run(["run", "train.py", *words])

    return code


def test_the_job_owns_its_files_and_each_run_is_a_new_one(run, capsys):
    names = set()
    for server in (Server(), Server(PVC)):
        assert run(server, "--", "--lr", "0.1") == 0
        made = ["create PersistentVolumeClaim"] * (not server.there)
        assert server.said == [*made, "create DDPJob", "create ConfigMap"]
        job = server.made["DDPJob"]
        names.add(name := job["metadata"]["name"])
        assert re.fullmatch(r"train-[a-z0-9]{5}", name)
        assert server.made["ConfigMap"]["metadata"]["ownerReferences"] == [
            {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "name": name, "uid": "u"}
        ]
        (trainer,) = job["spec"]["template"]["spec"]["containers"]
        assert trainer["command"][-3:] == ["train.py", "--lr", "0.1"]
        claim = {"claimName": "train-snapshots"}
        assert job["spec"]["snapshot"]["volume"] == {"persistentVolumeClaim": claim}
    assert len(names) == 2
    said = capsys.readouterr().err
    assert f"{name}: Running\n{name}: Succeeded, after" in said
    assert "claim train-snapshots: made, 10Gi" in said
    assert "claim train-snapshots: used as it is" in said


def test_the_exit_code_is_the_jobs(run, capsys):
    server = Server(phases=("", "", "", "Starting", "Failed"))
    assert run(server) == 3
    said = capsys.readouterr().err
    assert "does it run?\ntrain-" in said
    assert ": Starting\n" in said
    assert "says why" in said


def test_logs_that_end_are_opened_again_and_hide_no_success(run, capsys, monkeypatch):
    opened = []

    def broken(_: Any, looks: Any, __: Any, how_much: list[str], **___: Any) -> int:
        opened.append([word.partition("=")[0] for word in how_much])
        next(looks)
        next(looks)
        raise logs.Broken("the stream has ended")

    monkeypatch.setattr(logs, "follow", broken)
    assert run(Server()) == 0
    assert opened == [["--tail"], ["--tail", "--since"]]
    said = capsys.readouterr().err
    assert said.count("no logs for now: the stream has ended") == 1
    assert ": Succeeded, after" in said


def test_files_may_follow_options_and_the_hint_keeps_our_words(run, capsys):
    Path("vocab.txt").write_text("a")
    assert run(Server(), "--dry-run", "--replicas", "2", "vocab.txt") == 0
    assert "vocab.txt:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(Server(), "--epochs", "2", "--replicas", "2")
    cure = "kubectl ddp run train.py --replicas 2 -- --epochs 2"
    assert cure in capsys.readouterr().err


def test_requirements_are_a_file(run, capsys):
    Path("folder").mkdir()
    assert run(Server(), "--pip", "folder") == 1
    assert "--pip folder: a folder" in capsys.readouterr().err


def test_a_name_in_use_is_refused_before_anything_is_made(run, capsys):
    server = Server("ddpjobs mine")
    assert run(server, "--name", "mine") == 1
    assert server.said == []
    assert "there is a job mine: give another --name" in capsys.readouterr().err


@pytest.mark.parametrize("refused", ["create DDPJob", "create ConfigMap"])
def test_what_was_made_goes_again_when_the_rest_is_refused(run, capsys, refused):
    server = Server()
    server.refuses = refused
    assert run(server) == 1
    gone = ["delete ddpjobs"] * (refused != "create DDPJob")  # the claim may be in use by now
    assert server.said[server.said.index(refused) + 1 :] == gone
    assert f"you may not {refused}" in capsys.readouterr().err


def test_ctrl_c_while_the_job_is_made_leaves_none_and_names_it(run, capsys):
    server = Server()
    server.interrupts = "create DDPJob"
    assert run(server, "--name", "n") == 130
    assert server.said[-2:] == ["create DDPJob", "delete ddpjobs"]
    assert "n: removed again" in capsys.readouterr().err


@pytest.mark.parametrize("foreign", [False, True])
def test_a_job_is_ours_by_its_mark_where_the_connection_was_lost(run, capsys, foreign):
    server = Server()
    server.loses, server.foreign = "create DDPJob", foreign
    assert run(server, "--name", "n") == int(foreign)
    assert server.said[-1] == ("create DDPJob" if foreign else "create ConfigMap")
    assert ("unexpected EOF" in capsys.readouterr().err) == foreign


def test_ctrl_c_leaves_a_job_that_another_has_made_meanwhile(run):
    server = Server()
    server.interrupts, server.foreign = "create DDPJob", True
    assert run(server, "--name", "n") == 130
    assert server.said[-1] == "create DDPJob"


@pytest.mark.parametrize("owner", ["n", "other", ""])
def test_only_a_config_map_of_a_job_of_this_name_is_replaced(run, capsys, owner):
    server = Server()
    one = {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "name": owner, "uid": "old"}
    server.config_map = {"metadata": {"ownerReferences": [one] * bool(owner)}}
    assert run(server, "--name", "n") == (0 if owner == "n" else 1)
    assert server.said[-1] == ("create ConfigMap" if owner == "n" else "delete ddpjobs")
    said = capsys.readouterr().err
    assert ("there is a ConfigMap n-files, which is no job's" in said) == (owner != "n")


def test_a_dry_run_asks_nobody_and_prints_what_init_does(run, capsys):
    server = Server()
    assert run(server, "--dry-run", "--name", "n") == 0
    printed = capsys.readouterr().out
    assert server.said == []
    assert cli.run(["init", "train.py", "--name", "n", "--claim", "10Gi"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("answer", "goes_on"), [(None, True), ("", True), ("n", False)])
def test_ctrl_c_asks_whether_the_job_goes_on(run, capsys, monkeypatch, answer, goes_on):
    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    server = Server()
    monkeypatch.setattr(logs, "follow", interrupted)
    monkeypatch.setattr(os, "isatty", lambda _: answer is not None)
    monkeypatch.setattr(sys.stdin, "readline", lambda: f"{answer}\n", raising=False)
    assert run(server, "--context", "c") == 130
    said = capsys.readouterr().err
    assert ("Leave train-" in said) == (answer is not None)
    assert ("delete ddpjobs" in server.said) == (not goes_on)
    assert ("`kubectl ddp logs -f train-" in said) == goes_on
    assert said.count(" --context=c`") == 2 * goes_on


def test_files_that_no_config_map_holds_are_laid_on_the_claim_before(run, capsys, monkeypatch):
    server, laid = Server(), []
    monkeypatch.setattr(
        upload, "lay", lambda _, __, files, folder: laid.append((server.said[:], [*files], folder))
    )
    Path("data").mkdir()
    Path("data/large.bin").write_bytes(bytes(manifest.MOST_BYTES))
    Path("data/base.txt").write_text("two")
    Path("needs.txt").write_text("one\n-r data/base.txt")
    assert run(server, "data", "--name", "n", "--pip", "needs.txt") == 0
    folder = "/snapshots/n/files"
    sent = ("train.py", "data/base.txt", "data/large.bin")
    assert laid == [(["create PersistentVolumeClaim"], [*sent], folder)]
    pod = server.made["DDPJob"]["spec"]["template"]["spec"]
    (trainer,), (pip,) = pod["containers"], pod["initContainers"]
    assert trainer["command"][2:5] == ["--files", folder, "--anew"]
    assert [one["name"] for one in trainer["volumeMounts"]] == ["work", "packages"]
    assert [one["name"] for one in pip["volumeMounts"]] == ["files", "packages"]
    assert server.made["ConfigMap"]["data"] == {
        "needs.txt": "one\n-r data/base.txt", "data.base.txt": "two"
    }  # fmt: skip
    monkeypatch.setattr(manifest, "MOST_UPLOADED", 10**6)
    assert run(server, "data") == 1
    assert "the largest data/large.bin: what travels may have 1000000" in capsys.readouterr().err


#: The pod runs at once, and its commands run here.
POD = """
case "$1" in
  create) cat > "$HERE/pod.json" ;;
  get) [ -e "$HERE/looked" ] && now=Running || now=Pending; touch "$HERE/looked"
    echo '{"metadata": {}, "spec": {}, "status": {"phase": "'$now'"}}' ;;
  delete) touch "$HERE/deleted" ;;
  exec) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
esac
"""


@pytest.mark.parametrize("works", [True, False])
def test_the_claim_gets_the_files_alone_and_no_pod_stays(monkeypatch, tmp_path, works):
    for name, value in plugin.fake_kubectl(tmp_path, POD).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reader, "_SECONDS", 0.0)  # a node may take an hour to come
    (tmp_path / "large").write_bytes(bytes(10**6))
    (tmp_path / "link").symlink_to("large")
    folder = tmp_path / "claim/j/files"
    (folder / "old").mkdir(parents=True)
    job = plugin.job()
    job["spec"]["snapshot"] = {"path": "/s", "volume": {"persistentVolumeClaim": {}}}
    pod = {"securityContext": {"runAsUser": 7}, "containers": [{"image": "i"}]}
    job["spec"]["template"] = {"spec": pod}
    if not works:
        (tmp_path / "tar").write_text("#!/bin/sh\necho no space >&2; exit 2\n")
        (tmp_path / "tar").chmod(0o755)
    files = {"a/large": tmp_path / "large", "link": tmp_path / "link"}
    if works:
        upload.lay(Kubectl(), job, files, str(folder))
        assert {str(one.relative_to(folder)) for one in folder.rglob("*")} == {"a", *files}
        assert (folder / "link").read_bytes() == bytes(10**6)
        assert not (folder / "link").is_symlink()
        assert os.access(folder / "a/large", os.X_OK), "a program of mode 0644 starts"
        with pytest.raises(Failure, match="gone: No such file"):
            upload.lay(Kubectl(), job, files | {"gone": tmp_path / "gone"}, str(folder))
    else:
        with pytest.raises(Failure, match="no space"):
            upload.lay(Kubectl(), job, files, str(folder))
    made = json.loads((tmp_path / "pod.json").read_text())["spec"]
    assert (made["securityContext"], made["containers"][0]["image"]) == ({"runAsUser": 7}, "i")
    assert made["containers"][0]["volumeMounts"] == [{"name": "snapshots", "mountPath": "/s"}]
    assert (tmp_path / "deleted").exists()


@pytest.mark.tier("gate")
def test_packages_come_at_the_start_and_replace_none_of_the_images(tmp_path):
    """As the init container does, by an interpreter without pip."""
    script = manifest._PIP.replace(manifest._PACKAGES, str(tmp_path / "packages"))
    env = {"PATH": f"{Path(sys.executable).parent}:/bin:/usr/bin", "PIP_NO_INDEX": "1"}

    def install(name: str, needs: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "needs.txt").write_text(plugin.wheel(tmp_path, name, needs))
        return subprocess.run(
            ["sh", "-c", script, "sh", "needs.txt"], cwd=tmp_path, env=env, text=True,
            capture_output=True, check=False,
        )  # fmt: skip

    done = install("seven", "Requires-Dist: numpy\n")
    assert done.returncode == 0, done.stderr
    site = {"PYTHONPATH": str(tmp_path / "packages/site")}
    subprocess.run([sys.executable, "-c", "import seven; seven.x"], env=site, check=True)
    assert os.listdir(site["PYTHONPATH"]).count("numpy") == 0, "it is in the image"  # noqa: PTH208
    refused = install("other", "Requires-Dist: numpy<1\n")
    assert refused.returncode != 0
    assert "depends on numpy<1" in refused.stdout
