"""docs/guides/examples.md lists the examples that there are; each of them says how to run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = (ROOT / "docs/guides/examples.md").read_text()
#: Beside a script of the same folder, which imports it.
PARTS = {"examples/ladder/5_gpt/corpus.py", "examples/ladder/5_gpt/gpt.py"}
PARTS |= {"examples/ladder/5_gpt/mfu.py"}
FILES = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py")}


def test_the_index_names_every_example_and_no_other() -> None:
    assert set(re.findall(r"`(examples/[\w/]+\.py)`", INDEX)) == FILES - PARTS


@pytest.mark.parametrize("file", sorted(FILES - PARTS))
def test_an_example_says_how_to_run_it(file: str) -> None:
    about = (ROOT / file).read_text().split('"""')[1]
    assert re.search(rf"^    .*\b{Path(file).name}\b", about, re.MULTILINE)


@pytest.mark.parametrize("file", sorted(FILES))
def test_an_example_is_read_in_one_sitting(file: str) -> None:
    """About a page or two: what needs more is two examples."""
    assert len((ROOT / file).read_text().splitlines()) <= 150
