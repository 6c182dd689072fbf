"""Draws architecture.md's picture from the trainer's imports: `make manifests` after a change.

A room is a folder of the trainer, a file beside them, or the tools. The picture leaves out what
nearly all import, and arrows that follow from others, so that it can be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/architecture.md"
PACKAGES = ("ddpjob_trainer", "ddpjob_tools")
BEGIN, END = "<!-- drawn by docs/internals/architecture.py -->\n", "<!-- end -->\n"
#: Rooms without an arrow to any other, which every one may import.
GROUND = {
    "arguments",
    "environment",
    "errors",
    "failpoints",
    "gpu",
    "options",
    "printing",
    "trace",
    "tracebacks",
}

Arrows = dict[str, set[str]]


def arrows() -> Arrows:
    """Room -> the rooms that it imports."""
    sys.path[:0] = [str(ROOT / f"{part}/src") for part in ("contract", "trainer", "tools")]
    graph = grimp.build_graph(*PACKAGES)
    found: Arrows = {}
    for module in graph.modules - {PACKAGES[0]}:
        here = _room(module)
        targets = {_room(target) for target in graph.find_modules_directly_imported_by(module)}
        found.setdefault(here, set()).update(targets - {here})
    return found


def _room(module: str) -> str:
    """Return the module's room; ``import ddpjob_trainer``, the public API, is training's."""
    names = module.split(".")
    if names[0] == "ddpjob_tools":
        return "tools"
    return names[1] if len(names) > 1 else "training"


def reduced(graph: Arrows) -> Arrows:
    """Without the arrows to where a longer way leads as well."""
    beyond: Arrows = {}

    def reach(room: str) -> set[str]:
        if room not in beyond:
            beyond[room] = set()  # a circle ends here; import-linter tells of it
            beyond[room] = {far for near in graph.get(room, ()) for far in {near, *reach(near)}}
        return beyond[room]

    return {
        room: {t for t in targets if not any(t in reach(other) for other in targets - {t})}
        for room, targets in graph.items()
    }


def picture() -> str:
    """Return the graph in Mermaid's language, which GitHub draws."""
    left_out = {*GROUND, "__main__"}
    shown = {
        room: {t for t in targets if t not in left_out}
        for room, targets in arrows().items()
        if room not in left_out
    }
    lines = ["```mermaid", "flowchart TD"]
    for room, targets in sorted(reduced(shown).items()):
        lines += [f"    {room} --> {target}" for target in sorted(targets)] or [f"    {room}"]
    return "\n".join([*lines, "```", ""])


def drawn(page: str) -> str:
    """Return the page with the picture of now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + picture() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
