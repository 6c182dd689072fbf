"""Runs studies/ at their shortest, and lets tests import parts of them and of dev/bench/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.patience import WHOLE

ROOT = Path(__file__).resolve().parents[2]
for _part in ("dev/bench", "studies", "studies/programs"):
    if str(ROOT / _part) not in sys.path:
        sys.path.append(str(ROOT / _part))


def quick(name: str, directory: Path, *words: str) -> dict[str, Any]:
    """What `studies/NAME.py --quick` wrote."""
    out = directory / f"{name}.json"
    command = [sys.executable, str(ROOT / f"studies/{name}.py"), "--quick", "--json", str(out)]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, timeout=WHOLE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found
