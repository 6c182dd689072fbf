"""Words are made last: no code compares, searches or cuts a sentence of ours to steer itself."""

import ast
import re

import pytest

from support.cluster import ROOT

SOURCES = ("contract/src", "operator/src", "trainer/src", "tools/src", "plugin/src")
#: found.message, one["message"], found.get("message", ""), and str() of one, or of an error.
NAMES = "(message|exception|words|text|said|sentence|why)"
WORDS = re.compile(
    rf"([^(]*\.)?{NAMES}|.*\['{NAMES}'\]|.*\.get\('{NAMES}'.*\)|str\((.*\W)?({NAMES}|error|failure)\W*\)"
)
CUT = re.compile("r?partition|split|remove(pre|suf)fix|startswith|endswith")
PATTERN = re.compile("search|match|fullmatch|findall|finditer|sub|split")
#: Whose words which modules read.
STRANGERS = {
    "torch, its transports, CUDA and Python": "comm/peer_loss comm/rendezvous gpu/accelerator"
    " gpu/devices gradients/determinism hub/root_cause processes/source launcher/worker_group"
    " restore/load",
    "older launchers": "ddpjob_contract/exits hub/messages",
    "anybody, for passwords in URLs": "ddpjob_contract/text",
    "the API server and its policies, the scheduler, kubelets, runtimes": "core/evidence"
    " core/failure_text core/actions capacity/refusals shell/scheduling",
    "kubectl, kubelets, commands in a pod": "kubectl_ddp/kubectl kubectl_ddp/evidence"
    " kubectl_ddp/reader commands/pods",
}


def has_words(*nodes: ast.expr) -> bool:
    return any(WORDS.fullmatch(ast.unparse(one)) for one in nodes)


def is_syntax(node: ast.expr) -> bool:
    """Tell a separator, or nothing, from words."""
    return isinstance(node, ast.Constant) and not re.search("[a-zA-Z]", str(node.value))


def lines_that_read_words(source: str) -> list[int]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left, [ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()], [right]):
                reads: object = has_words(left, right) and not (is_syntax(left) or is_syntax(right))
            case ast.Call(ast.Attribute(value, name), [first, *more]):
                reads = CUT.fullmatch(name) and has_words(value) and not is_syntax(first)
                reads = reads or (PATTERN.fullmatch(name) and has_words(first, *more))
            case _:
                continue
        found += [node.lineno] if reads else []
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_no_code_reads_words_of_ours_again(source):
    for path in (ROOT / source).rglob("*.py"):
        lines = lines_that_read_words(path.read_text())
        known = f"{path.parent.name}/{path.stem}" in " ".join(STRANGERS.values()).split()
        assert bool(lines) is known, f"{path}, lines {lines}: carry it as data"


def test_each_way_to_read_them_is_seen():
    ways = """WAIT in found.message; one["said"] == "no"; text.endswith(GONE); P.search(words)
str(error).endswith("x"); found.get("exception", "") != DRILL; re.sub("a", "", str(one.text))
str(found.get("message", "")).removeprefix(ENDING); text.partition(":"); "" == said; words(text)"""
    assert lines_that_read_words(ways.replace("; ", "\n")) == [*range(1, 9)]
