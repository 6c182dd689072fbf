"""`kubectl ddp run`: what it creates, in which order, and how it ends."""

import json
import os
import re
import sys
from typing import Any

import pytest

from kubectl_ddp import cli, gang
from kubectl_ddp.commands import logs
from kubectl_ddp.kubectl import Failure, Kubectl
from support import plugin

PVC = "pvc train-snapshots"


class Server:
    """Stands in for kubectl: what is there, what came, and what is refused."""

    def __init__(self, *there: str, phases: tuple[str, ...] = ("Running", "Succeeded")) -> None:
        self.there, self.phases, self.refuses = there, list(phases), ""
        self.said: list[str] = []
        self.made: dict[str, Any] = {}

    def read(self, verb: str, *words: str, given: str | None = None) -> str:
        if verb == "get":
            kind, name = words[0].partition(".")[0], words[1]
            if words[2] == "--ignore-not-found":
                return f"{kind}/{name}" if f"{kind} {name}" in self.there else ""
            return json.dumps(self.job(self.phases.pop(0)))
        body = json.loads(given or "{}")
        what = f"{verb} {body.get('kind') or words[0].partition('.')[0]}"
        self.said.append(what)
        if what == self.refuses:
            raise Failure(f"you may not {what}")
        self.made[body.get("kind", "")] = body
        return json.dumps(self.job("") if "DDPJob" in self.made else {})

    def job(self, phase: str) -> dict[str, Any]:
        found = plugin.job(phase, version=len(self.phases))
        found["metadata"]["name"] = self.made["DDPJob"]["metadata"]["name"]
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
        assert server.said == [*made, "create DDPJob", "apply ConfigMap"]
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


def test_a_name_in_use_is_refused_before_anything_is_made(run, capsys):
    server = Server("ddpjobs mine")
    assert run(server, "--name", "mine") == 1
    assert server.said == []
    assert "there is a job mine: give another --name" in capsys.readouterr().err


@pytest.mark.parametrize("refused", ["create DDPJob", "apply ConfigMap"])
def test_what_was_made_goes_again_when_the_rest_is_refused(run, capsys, refused):
    server = Server()
    server.refuses = refused
    assert run(server) == 1
    gone = [*["delete ddpjobs"] * (refused != "create DDPJob"), "delete pvc"]
    assert server.said[server.said.index(refused) + 1 :] == gone
    assert f"you may not {refused}" in capsys.readouterr().err


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
    assert run(server) == 130
    said = capsys.readouterr().err
    assert ("Leave train-" in said) == (answer is not None)
    assert ("delete ddpjobs" in server.said) == (not goes_on)
    assert ("`kubectl ddp logs -f train-" in said) == goes_on
