"""Pages of docs: generated ones are up to date, links lead somewhere, names in them exist."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml

from ddpjob_tools import cli as tools
from ddpjob_trainer import cli as trainer
from ddpjob_trainer.arguments import joined
from kubectl_ddp import cli
from support.cluster import ROOT
from support.loaded import load
from support.manifest import documented, pages

DOCS = ROOT / "docs"
INTERNALS = DOCS / "internals"
LINK = re.compile(r"\]\(([^)#\s\[]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
#: Of the threat model: a file of tests and one of it.
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: Sections of start/ and guides/ whose commands a test runs as they are written.
RUN = {
    ("kueue.md", None): "tests/cluster/test_queue.py::test_the_page_as_it_is_read",
    ("your-script.md", "More files: a claim"): "tests/cluster/test_own_script.py"
    "::test_more_files_than_a_config_map_holds_lie_on_a_claim",
    ("your-script.md", "The weights"): "tests/cluster/test_examples.py"
    "::test_the_weights_can_be_had_when_all_pods_are_done",
}
#: Commands that a test runs, on whatever page, by how they begin.
RUN_ANYWHERE = {
    "helm test ddpjob": "tests/cluster/disruptive/test_operators.py::test_helm_test_passes",
    "make plugin": "tests/api/test_plugin.py::test_the_single_file_is_a_plugin_of_kubectl",
    "make try": "tests/trainer/test_local.py"
    "::test_make_try_kills_a_process_changes_no_bit_and_shows_it",
    "dev/devcluster/devcluster up": "tests/cluster/test_devcluster.py"
    "::test_up_repairs_a_killed_component",
    "dev/devcluster/devcluster down": "tests/cluster/test_devcluster.py"
    "::test_down_leaves_nothing_and_takes_nothing",
    "kubectl taint node NODE": "tests/cluster/disruptive/test_nodes.py"
    "::test_under_wait_the_job_says_what_ends_it_and_that_does",
    "kubectl apply -f manifests/examples/plain": "tests/cluster/test_examples.py"
    "::test_it_runs_to_its_end",
    "python 1_single.py": "tests/trainer/test_ladder.py::test_one_process",
    "torchrun --nproc-per-node 3 2_processes.py": "tests/trainer/test_ladder.py"
    "::test_any_number_of_processes_ends_with_the_same_weights",
}
PROGRAM = re.compile(
    r"(?:\$ )?((?:kubectl|helm|make|ddpjob(?:-trainer)?|torchrun|docker|kind|pip|etcdutl|python3?"
    r"|dev/devcluster/devcluster|tar|sed|cp|workload=\S+) .*)"
)
MOST_NOT_RUN = 36  # of 100 such commands; the figure only falls


def generated() -> Iterator[tuple[Path, str]]:
    """Yield (file, its text as its generator writes it now): `make manifests` writes them."""
    architecture = load(INTERNALS / "architecture.py")
    yield architecture.PAGE, architecture.drawn(architecture.PAGE.read_text())
    reference = load(DOCS / "reference/run.py")
    yield reference.PAGE, reference.page()
    ladder = load(DOCS / "guides/ladder.py")
    yield ladder.PAGE, ladder.written(ladder.PAGE.read_text())
    llms = load(DOCS / "llms.py")
    yield llms.PAGE, llms.written()


def test_generated_pages_are_what_their_scripts_write_now():
    old = [str(file.relative_to(ROOT)) for file, text in generated() if file.read_text() != text]
    assert old == [], "run `make manifests`"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in plain}


def broken(page: Path) -> Iterator[str]:
    for file, anchor in LINK.findall(CODE.sub("", page.read_text())):
        if ":" in file:
            continue
        there = page.parent / file if file else page
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors(there)
        ):
            yield f"{page.name}: {file}#{anchor}" if anchor else f"{page.name}: {file}"


def test_links_lead_somewhere(tmp_path):
    assert [link for page in pages() for link in broken(page)] == []
    page = tmp_path / "page.md"
    page.write_text("# One `two`: 3!\n[a](#one-two-3) [b](page.md#two) [c](no.md) `[d](no)`\n")
    assert list(broken(page)) == ["page.md: page.md#two", "page.md: no.md"], "it sees broken ones"


def test_every_page_can_be_reached_from_the_readme():
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        linked = {(page.parent / file).resolve() for file, _ in LINK.findall(page.read_text())}
        new |= {each for each in linked if each.suffix == ".md" and each.exists()} - reached
    assert [page.name for page in pages() if page.resolve() not in reached] == []


def test_the_maps_for_agents_name_what_exists():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]+)+)`", text)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists() and path[0] != "."] == []
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= set(targets)
    assert list(broken(DOCS / "llms.txt")) == []


def test_every_page_has_its_place_on_the_site():
    """`make site` refuses a page that has none, but only `make test-all` builds it."""
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    entries = [[each] if isinstance(each, str) else next(iter(each.values())) for each in found]
    placed = [page for group in entries for page in group]
    assert len(placed) == len(set(placed))
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} <= set(placed)


def functions(file: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, kinds)
    }  # fmt: skip


def missing(named: list[tuple[str, str]]) -> list[str]:
    return [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or (name and name not in functions(file))
    ]


def test_the_threat_model_names_tests_that_exist():
    page = (INTERNALS / "threat-model.md").read_text()
    rows = re.findall(r"^\| (T\d+) \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [f"T{number}" for number in range(1, len(rows) + 1)]
    assert [name for name, row in rows if not TEST.findall(row)] == []
    assert missing(TEST.findall(page)) == []


def test_jobs_on_pages_are_found_and_who_migrates_is_shown_the_launcher():
    """Under torchrun the status has its banner and not the script's exception."""
    shown = [place.partition(":")[0] for place, _ in documented()]
    assert shown.count("README.md") == 1
    jobs = [job for place, job in documented() if place.startswith("migration.md")]
    containers = [job["spec"]["template"]["spec"]["containers"][0] for job in jobs]
    assert [one["command"][:2] for one in containers] == [["ddpjob-trainer", "run"]] * 4


def commands() -> Iterator[tuple[Path, str, str]]:
    """Yield (page, heading, command) of the command lines in start/ and guides/."""
    for page in sorted(DOCS.glob("[gs][ut]*/*.md")):
        for section in re.split(r"^##+ ", page.read_text(), flags=re.MULTILINE):
            fences = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
            text = "".join(body for kind, body in fences if kind in ("", "sh"))
            for line in text.replace("\\\n", " ").splitlines():
                if found := PROGRAM.fullmatch(line):
                    yield page, section.partition("\n")[0], found[1]


def parsed(command: str) -> bool:
    """Whether it is a command of ours, which takes it; SystemExit if it does not."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = [*itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), lexer)]
    if words[0] == "ddpjob-trainer":
        trainer._parser().parse_args(joined(words[1:]))
        return True
    words = words[2:] if words[:2] == ["kubectl", "ddp"] else words[1:] * (words[0] == "ddpjob")
    if words[:1] and words[0] in tools._VERBS:
        tools._parser().parse_args(joined(words))
    elif words:
        cli._parsed(words)
    return bool(words)


def test_commands_that_no_test_knows_become_fewer():
    """A test runs a command, renders it (helm: tests/chart/test_documented.py) or parses it."""
    tests = [one.partition("::") for one in (*RUN.values(), *RUN_ANYWHERE.values())]
    assert missing([(file, name) for file, _, name in tests]) == []
    found = list(commands())
    left = [
        f"{page.name}: {command}"
        for page, heading, command in found
        if not {(page.name, None), (page.name, heading)} & RUN.keys()
        and not command.startswith(("helm install ", "helm upgrade ", *RUN_ANYWHERE))
        and not parsed(command)
    ]
    assert len(left) <= MOST_NOT_RUN, "\n".join([f"{len(left)} of {len(found)}:", *left])
