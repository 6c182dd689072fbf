"""docs/reference/run.md is what the docstrings of the public API say, and those say all of it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from support.loaded import load

ROOT = Path(__file__).resolve().parents[2]
GO = '''
def go(a, /, *rest: int, b: str = "x") -> int:
    """Go.

    ``a``: how far,
    in metres.
    ``b`` is how.

    Raises it.
    """
'''


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load(ROOT / "docs/reference/run.py")


def test_the_page_is_made_from_the_docstrings_of_now(reference: ModuleType) -> None:
    assert reference.PAGE.read_text() == reference.page(), "run `make manifests`"


def test_all_that_is_public_has_its_section(reference: ModuleType) -> None:
    tree = ast.parse(reference.PUBLIC.read_text())
    named = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert set(named) == reference.public().keys()
    text = reference.page()
    for call in ("run.steps", "run.prepare", "run.finish", "step.backward", "step.commit"):
        assert f"\n### {call}()\n" in text
    assert "\n### step.ends_epoch\n" in text
    assert "step.check_update" not in text, "what is for the loop is no user's business"


def test_options_become_a_list_and_long_calls_several_lines(reference: ModuleType) -> None:
    (node,) = ast.parse(GO).body
    assert reference.signature(node, "go") == "go(a, *rest: int, b: str = 'x') -> int"
    assert (
        reference.words(node) == "Go.\n\n- `a`: how far,\n  in metres.\n- `b` is how.\n\nRaises it."
    )
