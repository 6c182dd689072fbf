"""Runs `ddpjob audit` as users do, on the loops of support/audited."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.launching import PATHS
from support.patience import PATIENCE, WHOLE

LOOPS = Path(__file__).parent / "audited"


@dataclass(frozen=True)
class Audited:
    code: int
    out: str
    result: dict[str, Any]

    @property
    def kinds(self) -> list[tuple[str, int]]:
        """What was found, and from which step on."""
        return [(one["kind"], one["step"]) for one in self.result["findings"]]

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.result["findings"][0]["facts"]
        return facts


def command(folder: Path, script: str, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command, on a copy of the script in a folder of its own."""
    shutil.copy(LOOPS / script, folder)
    own = ("--patience", str(PATIENCE), *options)
    return [sys.executable, "-m", "ddpjob_tools", "audit", *own, "--", script, *words]


def environment(temporary: Path, first: str = "") -> dict[str, str]:
    """Temporary files go where a test can look for what is left."""
    paths = os.pathsep.join(filter(None, (first, PATHS)))
    return {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(temporary)}


def audited(
    tmp_path: Path, script: str, *words: str, options: tuple[str, ...] = (), first: str = ""
) -> Audited:
    """Audit a loop of tests/support/audited; ``first``: a folder before all others on the path."""
    folder = tmp_path / "here"
    folder.mkdir()
    report = tmp_path / "report.json"
    given = ("--json", str(report), *options)
    # A short name: sockets of DataLoader's workers lie there.
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            command(folder, script, *words, options=given), cwd=folder, text=True,
            env=environment(Path(temporary), first), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=WHOLE, check=False,
        )  # fmt: skip
        assert list(Path(temporary).glob("ddpjob-audit-*")) == [], "it leaves no file"
    assert [path.name for path in folder.iterdir()] == [script], "the user's folder as it was"
    result = json.loads(report.read_text()) if report.exists() else {}
    return Audited(done.returncode, done.stdout, result)
