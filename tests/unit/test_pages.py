"""Links of all pages lead somewhere, and the threat model names tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.cluster import ROOT
from support.manifest import documented, pages

LINK = re.compile(r"\]\(([^)#\s\[]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
#: What `kubectl get` prints of jobs: the command, the line of heads.
SAMPLE = re.compile(r"^\$ kubectl get (?:ddp|ddpjobs?)\b(.*)\n(NAME .*)$", re.MULTILINE)
#: Of docs/internals/threat-model.md: a file of tests and one of it.
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in plain}


def broken(page: Path) -> Iterator[str]:
    """Links of a page, outside of code, that lead nowhere."""
    for file, anchor in LINK.findall(CODE.sub("", page.read_text())):
        if ":" in file:
            continue
        there = page.parent / file if file else page
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors(there)
        ):
            yield f"{file}#{anchor}" if anchor else file


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_link_into_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`: 3!\n[a](#one-two-3) [b](page.md#two) [c](no.md) `[d](no)`\n")
    assert list(broken(page)) == ["page.md#two", "no.md"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        linked = {(page.parent / file).resolve() for file, _ in LINK.findall(page.read_text())}
        new |= {each for each in linked if each.suffix == ".md" and each.exists()} - reached
    assert [page.name for page in pages() if page.resolve() not in reached] == []


def test_the_readme_fits_on_three_screens_and_names_the_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    for target in ("try", "demo", "down", "help", "check", "test", "test-all"):
        assert f"make {target}" in text, target


def test_every_page_has_its_place_on_the_site() -> None:
    """`make site` refuses a page that has none, but is no part of any tier."""
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    entries = [[each] if isinstance(each, str) else next(iter(each.values())) for each in found]
    placed = [page for group in entries for page in group]
    assert len(placed) == len(set(placed))
    docs = ROOT / "docs"
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} <= set(placed)


def test_jobs_on_pages_are_found() -> None:
    shown = [place.partition(":")[0] for place, _ in documented()]
    assert shown.count("README.md") == 1
    assert shown.count("migration.md") == 4


def test_who_migrates_is_shown_the_launcher() -> None:
    """Under torchrun the status has its banner and not the script's exception."""
    jobs = [job for place, job in documented() if place.startswith("migration.md")]
    containers = [job["spec"]["template"]["spec"]["containers"][0] for job in jobs]
    assert [one["command"][:2] for one in containers] == [["ddpjob-trainer", "run"]] * 4


def test_what_a_dockerfile_copies_by_name_is_laid_there_before() -> None:
    text = (ROOT / "docs/start/your-script.md").read_text()
    names = re.findall(r"^COPY (\S*\.whl) ", text, re.MULTILINE)
    assert names
    for name in names:
        assert f"\ncp dist/{name} " in text.partition(f"\nCOPY {name} ")[0]


def test_samples_of_kubectl_get_have_the_columns_of_the_definition() -> None:
    crd = yaml.safe_load((ROOT / "manifests/crd.yaml").read_text())
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    found = 0
    for page in pages():
        for command, head in SAMPLE.findall(page.read_text()):
            wide = [each for each in columns if "wide" in command or not each.get("priority")]
            names = ["NAME", *(each["name"].upper() for each in wide)]
            assert (page.name, head.split()) == (page.name, names)
            found += 1
    assert found >= 2


def test_the_ways_through_the_code_name_files_that_exist() -> None:
    text = (ROOT / "docs/internals/reading.md").read_text().partition("## Four ways")[2]
    sources = [ROOT / "operator/src", ROOT / "trainer/src", ROOT / "tests"]
    known = [f"/{path.with_suffix('')}" for source in sources for path in source.rglob("*")]
    named = re.findall(r"`(\w+(?:/\w+)+)`", text)
    assert len(named) > 15
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in known)] == []


def functions(file: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_the_threat_model_names_tests_that_exist() -> None:
    page = (ROOT / "docs/internals/threat-model.md").read_text()
    rows = re.findall(r"^\| (T\d+) \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [f"T{number}" for number in range(1, 17)]
    for name, row in rows:
        named = TEST.findall(row)
        assert named, name
        for file, test in named:
            assert (ROOT / file).is_file(), f"{name}: {file}"
            assert test in functions(file), f"{name}: {file} has no {test}"
