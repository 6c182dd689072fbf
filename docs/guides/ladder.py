"""Writes into ladder.md what each step changes: `make manifests` after a change of a step.

Between `<!-- diff OLD NEW -->` and `<!-- end -->` is the difference of two files, without what
they say of themselves at their beginning, and as if both had the same name.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guides/ladder.md"
BLOCK = re.compile(r"(<!-- diff (\S+) (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
#: A docstring, or the comments at the beginning of a manifest.
ABOUT = re.compile(r'\A(""".*?"""\n+|(#.*\n)+\n)', re.DOTALL)


def difference(old: str, new: str) -> str:
    """Of two files by their paths in the repository, as a fenced block."""
    texts = [ABOUT.sub("", (ROOT / path).read_text()) for path in (old, new)]
    texts[0] = texts[0].replace(Path(old).stem, Path(new).stem)
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), n=1, lineterm="")
    body = ["@@" if line.startswith("@@") else line for line in list(lines)[2:]]
    return "\n".join(["```diff", *body, "```", ""])


def written(page: str) -> str:
    """Return the page with the differences of now."""
    return BLOCK.sub(lambda m: m[1] + difference(m[2], m[3]) + m[4], page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
