"""architecture.md tells of the rooms that are there, and its picture is of these imports."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from support.loaded import load

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs/internals/architecture.py"


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    return load(SCRIPT)


def test_the_picture_is_of_these_imports(architecture: ModuleType) -> None:
    page = architecture.PAGE.read_text()
    assert page == architecture.drawn(page), "run `make manifests`"


def test_each_room_has_a_paragraph(architecture: ModuleType) -> None:
    told = re.findall(r"^\*\*(\w+)\*\* ", architecture.PAGE.read_text(), re.MULTILINE)
    assert sorted(told) == sorted(architecture.arrows().keys() - architecture.GROUND - {"__main__"})


def test_what_is_not_drawn_imports_no_room(architecture: ModuleType) -> None:
    found = architecture.arrows()
    for name in architecture.GROUND:
        assert found[name] <= architecture.GROUND | {"data", "liveness"}, name


def test_only_arrows_that_follow_are_left_out(architecture: ModuleType) -> None:
    whole = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert architecture.reduced(whole) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
