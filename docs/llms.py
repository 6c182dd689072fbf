"""Writes llms.txt, the docs' map for programs (llmstxt.org), from mkdocs.yml: `make manifests`.

A page's note is its headings, so nobody keeps a second description of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/llms.txt"
FENCE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def elsewhere() -> dict[str, str]:
    """Return the pages outside docs/ by their name on the site, which dev/release/site.py adds."""
    text = (ROOT / "dev/release/site.py").read_text()
    (found,) = re.findall(r"^ELSEWHERE = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    return {name: f"../{source}" for source, name in ast.literal_eval(found).items()}


def written() -> str:
    """Return the whole file."""
    site, places = yaml.safe_load((ROOT / "mkdocs.yml").read_text()), elsewhere()
    about = LINK.sub(r"\1", (ROOT / "README.md").read_text().split("\n\n")[1])
    lines = [f"# {site['site_name']}", "", f"> {' '.join(about.split())}", ""]
    for entry in site["nav"]:
        pages = [entry]
        if not isinstance(entry, str):
            ((title, pages),) = entry.items()
            lines += ["", f"## {title}", ""]
        lines += [link(places.get(page, page)) for page in pages]
    return "\n".join([*lines, ""])


def link(page: str) -> str:
    """Return a page's line. ``page``: its path, seen from docs/."""
    title, *headings = headed(FENCE.sub("", (PAGE.parent / page).read_text()))
    return f"- [{title}]({page}){': ' * bool(headings)}{'; '.join(headings)}"


def headed(text: str) -> Iterator[str]:
    """Yield a page's title and the headings of its sections."""
    for found in re.findall(r"^##? (.+)$", text, re.MULTILINE):
        yield LINK.sub(r"\1", found).replace("`", "")


if __name__ == "__main__":
    PAGE.write_text(written())
