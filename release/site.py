"""Hooks of mkdocs: the README is the first page; links to the repository's files are text."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

README = Path(__file__).resolve().parents[1] / "README.md"
#: What leads out of docs/: a browser would find nothing there.
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as a page of docs/."""
    inside = re.sub(r"\]\((?!\w+:|#|docs/)", "](../", README.read_text()).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=inside))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Make plain text of links that lead out of docs/, and of regular expressions."""
    return OUTSIDE.sub(r"\1", markdown).replace("]([", "]\\([")
