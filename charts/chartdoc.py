"""Writes charts/ddpjob/README.md: how to install, and every value, from values.yaml's comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

INTRO = """\
# The chart ddpjob

<!-- Written by charts/render.py from values.yaml; change that file. -->

Installs the operator of DDPJobs: gangs of pods that train with PyTorch DDP and end in the same
weights whatever dies. Kubernetes 1.30 or newer.

```
helm install ddpjob charts/ddpjob -n ddpjob-system --create-namespace
helm test ddpjob -n ddpjob-system
```

Two releases in one cluster, upgrade, rollback and uninstall:
[docs/guides/operations.md](../../docs/guides/operations.md).

## Values

| value | default | what |
|---|---|---|
"""

_COMMENT = re.compile(r"^\s*# -- (.*)$")
_KEY = re.compile(r"^(\s*)([A-Za-z][A-Za-z0-9]*):")


def render(text: str) -> str:
    """values.yaml -> the page."""
    values = yaml.safe_load(text)
    rows = (
        # Outside of code <release> would be a tag that nobody sees.
        f"| `{path}` | `{json.dumps(_at(values, path))}` | {what.replace('<', '&lt;')} |"
        for path, what in _described(text)
    )
    return INTRO + "\n".join(rows) + "\n"


def _described(text: str) -> Iterator[tuple[str, str]]:
    """Yield (path, description) of every key below a `# --` line."""
    path: list[tuple[int, str]] = []
    what = ""
    for line in text.splitlines():
        if comment := _COMMENT.match(line):
            what = comment.group(1)
        elif key := _KEY.match(line):
            indent = len(key.group(1))
            path = [*(part for part in path if part[0] < indent), (indent, key.group(2))]
            if what:
                yield ".".join(name for _, name in path), what
            what = ""


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values
