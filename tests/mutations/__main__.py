"""`make mutations`: each mutation of table.py in a copy of the checkout, where a test must fail.

Writes tests/mutations/mutations.md with the test that found each out; fails if one goes unnoticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutations.table import MUTATIONS, Mutation
from support import tiers

ROOT = Path(__file__).resolve().parents[2]
_STUCK = 120  # seconds after which a test is stuck, which finds a mutation out as well
PAGE = ROOT / "tests/mutations/mutations.md"
HEAD = """# Mutations

Decisive lines made wrong on purpose, and the first test of the gate that found each out.
`make mutations` tries them all, each in a copy of the checkout, and writes this page.

| what is wrong | file | found out by |
|---|---|---|
"""


def copy(where: Path) -> None:
    """The files of the checkout as they are, new ones too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, where / name)


def found_out_by(mutation: Mutation, where: Path) -> str:
    """The test that failed; "" if none did."""
    file = where / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file}: not once: {mutation.old!r}"
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", mutation.tests, "-x", "-q", "-p", "no:cacheprovider",
             f"--timeout={_STUCK}", f"--tier={tiers.GATE}"],
            cwd=where, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    finally:
        file.write_text(text)
    failed = re.search(r"^FAILED (\S+?)(?:\[| |$)", ran.stdout, re.MULTILINE)
    return failed[1] if ran.returncode == 1 and failed else ""


def main() -> None:
    """Try all; exit 1 if one was not found out."""
    lines, missed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        for mutation in MUTATIONS:
            test = found_out_by(mutation, Path(folder))
            print(f"{'found' if test else 'MISSED'}: {mutation.what}: {test}", flush=True)
            missed += not test
            shown = test.removeprefix("tests/unit/").replace("::", "` `") or "nothing"
            lines.append(f"| {mutation.what} | `{mutation.file}` | `{shown}` |\n")
    PAGE.write_text(HEAD + "".join(lines))
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
