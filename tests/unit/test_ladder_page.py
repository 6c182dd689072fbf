"""docs/guides/ladder.md shows the files as they are, and names only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from support.loaded import load

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
#: Of the table: a file of the repository, a test of it perhaps.
NAMED = re.compile(r"\b((?:bench|docs|examples|manifests|tests)/[\w./-]+\.\w+)(?:::(\w+))?")


@pytest.fixture(scope="module")
def ladder() -> ModuleType:
    return load(ROOT / "docs/guides/ladder.py")


@pytest.fixture(scope="module")
def page(ladder: ModuleType) -> str:
    return str(ladder.PAGE.read_text())


def rows(page: str) -> dict[int, str]:
    """Of the table, by number."""
    found = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    return {int(number): rest for number, rest in found}


def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_differences_are_those_of_the_files(ladder: ModuleType, page: str) -> None:
    assert len(ladder.BLOCK.findall(page)) == 5
    assert page == ladder.written(page), "run `make manifests`"


def test_a_difference_leaves_out_what_files_say_of_themselves(
    ladder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text('"""One.\n\nMore.\n"""\n\nimport one\nx = 1\n')
    (tmp_path / "two.py").write_text('"""Two."""\n\nimport two\nx = 2\n')
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    assert (
        ladder.difference("one.py", "two.py") == "```diff\n@@\n import two\n-x = 1\n+x = 2\n```\n"
    )


def test_every_row_is_there_and_runs_somewhere(page: str) -> None:
    found = rows(page)
    assert list(found) == list(range(1, 34))
    for number, row in found.items():
        says, runs, checked = row.split(" | ")
        assert says, number
        assert NAMED.search(runs) or LINK.search(runs) or runs == "this page", number
        assert NAMED.search(checked), number


@pytest.mark.parametrize("number", range(1, 34))
def test_what_a_row_names_exists(page: str, number: int) -> None:
    for file, name in NAMED.findall(rows(page)[number]):
        assert (ROOT / file).is_file(), file
        assert not name or name in functions_of(file), f"{file} has no {name}"


def test_links_lead_somewhere(page: str) -> None:
    links = [link for link in LINK.findall(page) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs/guides" / link).exists()] == []
