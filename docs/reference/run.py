"""Writes run.md from the docstrings of the public API: `make manifests` after a change of one.

ddpjob_trainer/__init__.py names what is public and the file of each; those are read, not imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/run.md"
SOURCE = ROOT / "trainer/src"
PUBLIC = SOURCE / "ddpjob_trainer/__init__.py"
#: In the order of a script; what is public and not here follows.
ORDER = (
    "start",
    "Snapshots",
    "Logging",
    "Run",
    "Step",
    "steps_per_epoch",
    "read_snapshot",
    "ConfigError",
)
#: What a script calls an object of these.
CALLED = {"Run": "run", "Step": "step"}
#: Parts of a class that end what is public.
INSIDE = re.compile(r"^    # --- (?:Inside|For the loop)", re.MULTILINE)
WIDTH = 88
HEAD = """\
# Run and Step

Made by `make manifests` from docstrings. How calls go together: [training](../guides/training.md).

Words: [glossary](glossary.md). All ranks make each call unless it says otherwise. Wrong input
raises ConfigError. Times are seconds, sizes bytes; steps count from 0, finished steps from 1.
"""

Function = ast.FunctionDef


def public() -> dict[str, Path]:
    """Return the file of each public name, in ORDER."""
    found: dict[str, Path] = {}
    for node in ast.walk(ast.parse(PUBLIC.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddpjob_trainer."):
            file = SOURCE / Path(*str(node.module).split(".")).with_suffix(".py")
            found |= {alias.name: file for alias in node.names}
    order = [*ORDER, *sorted(found.keys() - set(ORDER))]
    return {name: found[name] for name in order if name in found}


def signature(node: Function, name: str) -> str:
    """Return a call as its definition declares it, over several lines where it is long."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    words = [_one(a, d) for a, d in zip(plain, [*missing, *args.defaults], strict=True)]
    if plain and plain[0].arg == "self":
        words = words[1:]
    if args.vararg:
        words.append("*" + _one(args.vararg, None))
    elif args.kwonlyargs:
        words.append("*")
    words += [_one(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        words.append("**" + _one(args.kwarg, None))
    found = ast.unparse(node.returns) if node.returns else "None"
    returns = f" -> {found}" if found != "None" else ""
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])


def _one(arg: ast.arg, default: ast.expr | None) -> str:
    typed = f"{arg.arg}: {ast.unparse(arg.annotation)}" if arg.annotation else arg.arg
    if default is None:
        return typed
    said = ast.unparse(default)
    return f"{typed.removesuffix(' | None') if said == 'None' else typed} = {said}"


def fields(node: ast.ClassDef) -> str:
    """Return a dataclass as it is made, with the defaults that its options declare."""
    found = [
        f"    {_one(ast.arg(each.target.id, each.annotation), each.value.args[0])},"
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and isinstance(each.value, ast.Call)
        and each.value.args
    ]
    return (
        "\n".join(["```python", f"{node.name}(", "    *,", *found, ")", "```\n\n"]) if found else ""
    )


def words(node: ast.AST) -> str:
    """Return a docstring in Markdown: an option that begins a line becomes an item."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines: list[str] = []
    for line in (ast.get_docstring(node) or "").splitlines():
        before = lines[-1] if lines else ""
        begins = re.match(r"``[\w*]+``(:| )", line) and (not before or before.endswith((".", ":")))
        within = before.startswith(("- ", "  ")) and line
        lines.append(f"- {line}" if begins else f"  {line}" if within else line)
    text = re.sub(r"(?m)^(?!- |  )(.+)\n(?=- )", r"\1\n\n", "\n".join(lines))
    return re.sub(r"\s+Raises\s+ConfigError\.", "", text).replace("``", "`")  # HEAD says it of all


def members(owner: ast.ClassDef, source: str) -> Iterator[Function]:
    """Yield the public methods and properties of a class; of overloads what implements them."""
    lines = source.splitlines()
    for node in owner.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if INSIDE.search("\n".join(lines[owner.lineno : node.lineno])):
            return
        overloaded = any(ast.unparse(each) == "overload" for each in node.decorator_list)
        if not node.name.startswith("_") and not overloaded:
            yield node


def entry(name: str, file: Path) -> str:
    """Return a public name's section."""
    source = file.read_text()
    tree = ast.parse(source)
    node = next(each for each in tree.body if getattr(each, "name", None) == name)
    if isinstance(node, ast.FunctionDef):
        code = f"```python\n{signature(node, name)}\n```"
        return f"## {name}()\n\n{code}\n\n{words(node)}\n"
    assert isinstance(node, ast.ClassDef)
    declared = fields(node)
    parts = [f"## {name}\n\n{declared}{words(node)}\n"]
    for each in members(node, source):
        short = f"{CALLED.get(name, name)}.{each.name}"
        if any(ast.unparse(one) == "property" for one in each.decorator_list):
            kind = f": {ast.unparse(each.returns)}" if each.returns else ""
            parts.append(f"### {short}\n\n`{short}{kind}`. {words(each)}\n")
        else:
            code = f"```python\n{signature(each, short)}\n```"
            parts.append(f"### {short}()\n\n{code}\n\n{words(each)}\n")
    return "\n".join(parts)


def page() -> str:
    """Return run.md as the docstrings of now make it."""
    return "\n".join([HEAD, *(entry(name, file) for name, file in public().items())])


if __name__ == "__main__":
    PAGE.write_text(page())
