"""The shape of the checkout: what must not be where, how long files are, one version."""

import operator
import re
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "contract/src",
    "operator/src",
    "trainer/src",
    "tools/src",
    "plugin/src",
    "dev/devcluster/src",
)
MAX_LINES = 600
MAX_MODULES = 12
MAX_NAME = 70  # letters of a test's name
#: The most lines of Python below each folder. A figure falls with what is removed; a commit that
#: raises one says which user asked for what it adds.
MOST_LINES = {
    "contract/src": 936,
    "operator/src": 11_994,
    "trainer/src": 28_448,
    "tools/src": 5_391,
    "plugin/src": 5_014,
    "dev/bench": 4_615,
    "dev/devcluster": 3_868,
    "studies": 3_826,
    "tests": 62_340,
}
MOST_WORDS = 44_944  # of all pages in docs
MOST_WORDS_OF_A_GUIDE = 1_500  # what a reader takes in at once; the ladder is half diffs
#: Words that make a reader stop: CONTRIBUTING, *English*.
HARD_WORDS = re.compile(
    r"\b(told|anew|mend(s|ed|ing)?|stands|whoever|whom|of its own)\b", re.IGNORECASE
)
#: What people read, and how often it may still use one of them. A figure only falls.
MOST_HARD_WORDS = dict.fromkeys(
    ("charts", "contract/src", "dev", "examples", "manifests/examples", "operator/src", "studies"),
    0,
) | {"AGENTS.md": 0, "README.md": 0, "docs": 0, "plugin/src": 0, "tools/src": 4, "trainer/src": 2}
TEXTS = {".json", ".md", ".py", ".tpl", ".txt", ".yaml"}
RECORDS = {"soak.json", "test-durations.json"}  # what runs have written
KEPT = re.compile(r"\btest_\w+|--anew\b")  # names that pages quote, and an option that exists


def test_the_bounds_of_torch_are_tried_out():
    about = tomllib.loads((ROOT / "trainer/pyproject.toml").read_text())["project"]
    [bounds] = [name for name in about["dependencies"] if name.startswith("torch")]
    found = re.search(r"^TORCH_VERSIONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    oldest, newest = (version.split(".") for version in found[1].split())
    assert bounds == f"torch>={'.'.join(oldest[:2])},<{newest[0]}.{int(newest[1]) + 1}"


def test_folder_operator_does_not_shadow_the_standard_library():
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    assert operator.__file__ is not None
    assert Path(operator.__file__).resolve() == standard / "operator.py"
    loose = [path.name for path in (ROOT / "operator").glob("*.py*") if path.suffix != ".toml"]
    assert loose == [], "operator/ holds src/ and pyproject.toml only"
    assert not list((ROOT / "operator").glob("test*"))


@pytest.mark.parametrize("source", SOURCES)
def test_files_stay_short_say_what_they_are_for_and_have_names(source):
    vague = re.compile(r"^(utils?|helpers?|common|misc)$")
    assert not [path for path in (ROOT / source).rglob("*") if vague.match(path.stem)]
    files = [*(ROOT / source).rglob("*.py")]
    assert files, f"no modules below {source}"
    for path in files:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        assert len(text.splitlines()) <= MAX_LINES, f"{name}: split it by what it is about"
        assert text.startswith(('"""', '#!/usr/bin/env python3\n"""')), name


def test_names_of_tests_are_short():
    named = re.compile(rf"^ *(?:async )?def (test_\w{{{MAX_NAME - 4},}})", re.MULTILINE)
    found = [
        name for path in (ROOT / "tests").rglob("*.py") for name in named.findall(path.read_text())
    ]
    assert found == [], f"say it to a stranger in {MAX_NAME} characters"


@pytest.mark.parametrize("folder", MOST_LINES)
def test_who_adds_lines_removes_others(folder):
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= MOST_LINES[folder], "remove as many, or say in the commit who needs them"


def test_who_adds_words_removes_others():
    words = sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
    assert words <= MOST_WORDS, "remove as many, or say in the commit who needs them"


def test_guides_are_read_in_one_go():
    pages = [path for name in ("guides", "start") for path in (ROOT / "docs" / name).glob("*.md")]
    long = {path.name for path in pages if len(path.read_text().split()) > MOST_WORDS_OF_A_GUIDE}
    assert long == {"ladder.md"}, "split it by what its reader wants to do"


def test_a_package_is_seen_at_a_glance():
    found = {
        str(folder.parent.relative_to(ROOT)): len(list(folder.parent.glob("*.py"))) - 1
        for source in SOURCES
        for folder in (ROOT / source).rglob("__init__.py")
    }
    large = {name for name, n in found.items() if n > MAX_MODULES}
    assert large == set(), "group modules by concept"


@pytest.mark.parametrize("place", MOST_HARD_WORDS)
def test_people_read_plain_words(place):
    """Of Python too the whole text: comments, strings and names, each part of a name a word."""
    root = ROOT / place
    found = [
        f"{path.relative_to(ROOT)}: {word[0]}"
        for path in (sorted(root.rglob("*.*")) if root.is_dir() else [root])
        if path.suffix in TEXTS and path.name not in RECORDS
        for word in HARD_WORDS.finditer(re.sub(r"[\W_]+", " ", KEPT.sub("", path.read_text())))
    ]
    words = "CONTRIBUTING, English; the words of docs/reference/glossary.md"
    assert len(found) <= MOST_HARD_WORDS[place], "\n".join([words, *found])


def test_lock_files_agree_and_name_no_index():
    pin = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)
    requirements = ROOT / "dev/requirements"
    everything = set(pin.findall((requirements / "dev.txt").read_text()))
    for lock in ("operator.txt", "torch.txt", "trainer.txt"):
        pins = set(pin.findall((requirements / lock).read_text()))
        assert pins, lock
        assert pins <= everything, f"{lock} has pins that dev.txt has not: run `make lock`"
    # The trainers of others bring packages of their own; what they share with us is ours.
    ours = {name for name, _ in everything}
    foreign = set(pin.findall((requirements / "foreign.txt").read_text()))
    assert {one for one in foreign - everything if one[0] in ours} == set()
    for lock in requirements.glob("*.txt"):
        assert "://" not in lock.read_text(), f"{lock.name} names a place"
        assert "--hash=sha256:" in lock.read_text(), f"{lock.name} has no hashes"
