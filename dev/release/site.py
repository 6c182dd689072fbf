"""Hooks of mkdocs: pages from outside docs/, links to other files as text, breaks in long names."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
#: Pages that lie elsewhere in the repository, and what they are called here.
ELSEWHERE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "charts/ddpjob/README.md": "chart.md",
}
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Lay each page's source beside it, to which llms.txt links (docs/llms.py)."""
    site = Path(config.site_dir)
    sources = {str(path.relative_to(DOCS)): path for path in DOCS.rglob("*.md")}
    sources |= {page: ROOT / source for source, page in ELSEWHERE.items()}
    text = (site / "llms.txt").read_text()
    for page, source in sources.items():
        (site / page).write_text(source.read_text())
        text = text.replace(f"](../{source.relative_to(ROOT)})", f"]({page})")
    (site / "llms.txt").write_text(text)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links lead to pages; those to other files, and regular expressions, become plain text."""
    here = {name: source for source, name in ELSEWHERE.items()}
    folder = posixpath.dirname(here.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    on_site = posixpath.dirname(page.file.src_uri) or "."

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        if path in ELSEWHERE or path.startswith("docs/"):
            target = ELSEWHERE.get(path, path.removeprefix("docs/"))
            return f"[{found[1]}]({posixpath.relpath(target, on_site)}{found[3] or ''})"
        return found[1]

    return LINK.sub(link, markdown).replace("]([", "]\\([")


def on_page_content(html: str, **_: object) -> str:
    """Let names in tables break behind their parts, not between any two letters."""

    def parts(found: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([._/:]+)(?=\w)", r"\1<wbr>", found[0].replace("[].", "[].<wbr>"))

    return CELL.sub(lambda cell: CODE.sub(parts, cell[0]), html)
