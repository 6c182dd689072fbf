"""`ddpjob`: one command on a laptop; what it hands over, and its old spelling."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ddpjob_tools import cli, cluster
from kubectl_ddp.cli import parser
from support.launching import PATHS, ROOT

SOURCES = [ROOT / one / "src" for one in ("contract", "trainer", "tools")]


def run(
    module: str, *words: str, path: Path, paths: str = PATHS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *words], cwd=path, capture_output=True, text=True,
        check=False, env={"PYTHONPATH": paths, "PATH": str(path)},
    )  # fmt: skip


def test_the_old_spelling_is_refused_with_the_new_one(tmp_path):
    old = run("ddpjob_trainer", "audit", "--", "no.py", path=tmp_path)
    assert old.returncode == 2
    assert old.stderr.endswith("ddpjob-trainer: error: write `ddpjob audit`\n")


def test_what_is_the_plugins_is_handed_over(tmp_path):
    alone = os.pathsep.join(map(str, SOURCES))
    lacking = run("ddpjob_tools", "status", "digits", path=tmp_path, paths=alone)
    assert (lacking.returncode, lacking.stdout) == (127, "")
    assert lacking.stderr.startswith("ddpjob status: needs kubectl-ddp on PATH (No such file")
    (tmp_path / "kubectl-ddp").write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    (tmp_path / "kubectl-ddp").chmod(0o755)
    for words in (("logs", "digits", "--help"), ("--context=c", "why", "digits")):
        done = run("ddpjob_tools", *words, path=tmp_path, paths=alone)
        assert (done.returncode, done.stdout) == (7, f"{' '.join(words)}\n")


def test_its_help_has_a_line_for_each_of_its_commands_and_of_the_plugins():
    [plugins] = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    assert {one.dest: one.help for one in plugins._choices_actions} == cluster.COMMANDS
    shown = cli._parser().format_help()
    for name in ("audit", "chaos", "gpu-check", "local", *cluster.COMMANDS):
        assert f"\n    {name} " in shown or f"\n    {name}\n" in shown
