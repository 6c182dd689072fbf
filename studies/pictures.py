"""Draws docs/pictures/*.svg from recorded data: `make manifests` after a new recording.

buckets.json and ring.json are recorded by recordings.py, scaling.json by scaling.py; goodput is
that of docs/guides/goodput.md. What survives what and a gang's life are tables in this file.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs/pictures"
INK, PALE, RED = "#222222", "#bbbbbb", "#c0392b"
AGAIN, HELD, TRAINS, GREY = "#d98c2b", "#b9d3ee", "#3b6fb6", "#555555"
DARK = "@media (prefers-color-scheme:dark){svg{filter:invert(.88) hue-rotate(180deg)}}"
COLOURS = ("#3b6fb6", "#d98c2b", "#4f9d69", "#8e6bb0", "#b65a5a", "#5aa7b6")

Found = Mapping[str, Any]


class Picture:
    """Shapes on a white sheet; coordinates in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        tip = f'<path d="M0 0L8 4L0 8z" fill="{INK}"/>'
        marker = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"'
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
            f"<title>{escape(title)}</title><style>{DARK}</style>",
            f'<defs><marker id="tip" {marker} orient="auto">{tip}</marker></defs>',
        ]
        self.rect(0, 0, width, height, "white")
        self.text(16, 22, title, size=15)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none"
    ) -> None:
        """``edge``: the colour of its line."""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
            f' fill="{fill}" stroke="{edge}"/>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        colour: str = INK,
        *,
        dashes: str = "",
        arrow: bool = False,
        width: float = 1.0,
    ) -> None:
        """``dashes`` as SVG has them; ``arrow``: a tip at its end."""
        more = f' stroke-dasharray="{dashes}"' if dashes else ""
        more += ' marker-end="url(#tip)"' if arrow else ""
        self._shapes.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
            f' stroke-width="{width}"{more}/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        """Its centre."""
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        at: str = "start",
        colour: str = INK,
    ) -> None:
        """``at``: start, middle or end of the words is at (x, y)."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{at}"'
            f' fill="{colour}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """Return the whole file."""
        return "\n".join([*self._shapes, "</svg>"]) + "\n"


# -- one backward, bucket by bucket -------------------------------------------------------------


def buckets(found: Found) -> str:
    """Time runs to the right; a bar from a bucket's first gradient to its end of all-reduce."""
    marks, gradients = found["buckets"], found["gradients"]
    left, top, row, width = 250, 96, 52, 960
    ended = found["backward"] + found["exposed"]
    scale = (width - left - 30) / ended
    base = top + row * len(marks)
    picture = Picture(
        width, base + 130, "One backward of DDP: buckets fill, and are reduced meanwhile"
    )

    def place(seconds: float) -> float:
        return left + scale * seconds

    picture.text(
        16,
        42,
        f"{found['ranks']} ranks with a core each, gloo; a recorded step of a small GPT, on rank"
        " 0's clock. Milliseconds since backward began.",
        colour="#555555",
    )
    picture.text(16, 74, "each gradient, when it is ready")
    parts = of_buckets(gradients, marks)
    last = place(found["backward"])
    picture.rect(last, 56, place(ended) - last, base - 56, "#f6e3e0")
    for number, (mark, own) in enumerate(zip(marks, parts, strict=True)):
        colour, y = COLOURS[number % len(COLOURS)], top + row * number
        for gradient in own:
            picture.line(place(gradient["ready"]), 60, place(gradient["ready"]), 80, colour)
        begun, ready, done = own[0]["ready"], mark["ready"], mark["done"]
        picture.text(16, y + 18, f"bucket {number}: {mark['bytes'] / 1e6:.2f} MB")
        for line, end in ((32, own[0]), (45, own[-1])):
            picture.text(16, y + line, end["name"], size=10, colour="#777777")
        picture.rect(place(begun), y + 14, place(ready) - place(begun), 6, colour)
        picture.rect(place(ready), y + 6, place(done) - place(ready), 22, colour, INK)
    picture.line(last, 56, last, base + 6, RED, dashes="4 3")
    step = nice(ended * 1000 / 8)
    picture.line(left, base + 6, place(ended), base + 6)
    for tick in range(int(ended * 1000 / step) + 1):
        x = place(tick * step / 1000)
        picture.line(x, base + 6, x, base + 11)
        picture.text(x, base + 25, f"{tick * step:g}", at="middle", size=11)
    y = base + 52
    picture.rect(16, y - 6, 40, 6, COLOURS[0])
    picture.text(
        64, y, "a bucket fills: its first gradient to its last (names at the left, in order)"
    )
    picture.rect(16, y + 10, 40, 16, COLOURS[0], INK)
    picture.text(
        64, y + 23, "its all-reduce: handed to gloo when it is full, until all ranks' sum is there"
    )
    picture.rect(16, y + 36, 40, 16, "#f6e3e0")
    exposed, whole = found["exposed"], sum(mark["done"] - mark["ready"] for mark in marks)
    picture.text(
        64,
        y + 49,
        f"exposed: the last bucket was ready at {1000 * found['backward']:.1f} ms, backward"
        f" returned at {1000 * ended:.1f}: {1000 * exposed:.1f} ms. The all-reduces' times add"
        f" up to {1000 * whole:.1f} ms",
    )
    return picture.svg()


def of_buckets(gradients: list[Found], marks: list[Found]) -> list[list[Found]]:
    """List the gradients in each bucket: rebuilt buckets hold them in the order of readiness."""
    parts, rest = [], list(gradients)
    for mark in marks:
        own, size = [], 0
        while size < mark["bytes"]:
            own.append(rest.pop(0))
            size += own[-1]["bytes"]
        parts.append(own)
    return parts


def nice(value: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``value``."""
    power = 10 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


# -- a ring all-reduce, step by step ------------------------------------------------------------


def ring(found: Found) -> str:
    """Draw a row per moment, a block per rank, a cell per chunk with the ranks in it."""
    world, cell, gap = found["ranks"], 44, 46
    steps = 2 * (world - 1)
    block = world * cell + gap
    top, row, left = 112, 74, 150
    picture = Picture(
        left + world * block,
        top + row * steps + 74,
        f"A ring all-reduce of {world} ranks, as recorded",
    )
    picture.text(
        16,
        42,
        f"{found['bytes']:,} bytes in {world} chunks; a cell names the ranks whose numbers the"
        " chunk is the sum of. An arrow is one message of one chunk.",
        colour="#555555",
    )
    for rank in range(world):
        x = left + rank * block
        picture.text(x + world * cell / 2, 74, f"rank {rank}", at="middle", size=14)
        for chunk in range(world):
            picture.text(x + (chunk + 0.5) * cell, 96, f"chunk {chunk}", at="middle", size=10)
    for moment, holds in enumerate(states(found)):
        y = top + row * moment
        sends = [one for one in found["sends"] if one["step"] == moment]
        name = sends[0]["phase"] if sends else "all have the sum"
        picture.text(16, y + 20, name)
        if sends:
            picture.text(16, y + 36, f"step {moment + 1} of {steps}", size=10, colour="#777777")
        leaving = {(one["from"], one["chunk"]) for one in sends}
        for (rank, chunk), of in holds.items():
            x = left + rank * block + chunk * cell
            edge = RED if (rank, chunk) in leaving else PALE
            picture.rect(x + 2, y, cell - 4, 30, shade(len(of), world), edge)
            words = "".join(map(str, sorted(of)))
            picture.text(x + cell / 2, y + 19, words, at="middle", size=11)
        for one in sends:
            centre = (one["chunk"] + 0.5) * cell + left
            x1, x2 = centre + one["from"] * block, centre + one["to"] * block
            colour, dashes = (PALE, "5 4") if one["to"] < one["from"] else (INK, "")
            picture.line(x1, y + 31, x2, y + row - 2, colour, arrow=True, dashes=dashes)
    sent = {
        rank: sum(one["bytes"] for one in found["sends"] if one["from"] == rank)
        for rank in range(world)
    }
    counts = ", ".join(f"{count:,}" for count in sent.values())
    picture.text(
        16,
        top + row * steps + 58,
        f"Bytes sent by rank 0 to {world - 1}: {counts}. No rank is special;"
        f" 2 N (W - 1) / W = {2 * found['bytes'] * (world - 1) // world:,}.",
    )
    return picture.svg()


def states(found: Found) -> list[dict[tuple[int, int], set[int]]]:
    """(rank, chunk) -> whose numbers it holds, before each step and after the last.

    Rank r put 2^r into every chunk, so the value of a chunk that was sent tells.
    """
    world = found["ranks"]
    holds = {(rank, chunk): {rank} for rank in range(world) for chunk in range(world)}
    moments = [dict(holds)]
    for step in range(2 * (world - 1)):
        for one in found["sends"]:
            if one["step"] == step:
                of = {rank for rank in range(world) if int(one["value"]) >> rank & 1}
                at = (one["to"], one["chunk"])
                holds[at] = of | holds[at] if one["phase"] == "reduce-scatter" else of
        moments.append(dict(holds))
    return moments


def shade(count: int, most: int) -> str:
    """Return a shade, darker with more ranks; green when all are in."""
    light = round(255 - 110 * (count - 1) / max(1, most - 1))
    return f"#{light:02x}{min(255, light + 30):02x}ff" if count < most else "#9fd6ae"


# -- throughput against processes ---------------------------------------------------------------


def scaling(found: Found) -> str:
    """Draw a panel per model and way to scale: samples per second, of one process's."""
    modes = ("weak", "strong")
    names = list(found["steps"])
    side, gap, left, top = 240, 66, 64, 84
    picture = Picture(
        left + len(names) * (side + gap),
        top + 2 * (side + gap) + 40,
        "Samples per second, as a multiple of one process's",
    )
    picture.text(
        16,
        42,
        f"{found['cores']} cores: 1 and 2 processes have one each, 4 share them. 8: the model"
        " alone. Both axes are logarithmic.",
        colour="#555555",
    )
    for line, mode in enumerate(modes):
        for column, name in enumerate(names):
            x, y = left + column * (side + gap), top + line * (side + gap)
            panel(picture, found, name, mode, x, y, side)
    y = top + 2 * (side + gap) + 12
    picture.dot(24, y - 4, COLOURS[0])
    picture.text(36, y, "measured: median, range")
    picture.rect(220, y - 12, 10, 16, "#f0d3a8", COLOURS[1])
    picture.text(238, y, "the ring's model: all communication hidden (top) or none (bottom)")
    picture.line(680, y - 4, 715, y - 4, PALE, dashes="4 3")
    picture.text(722, y, "linear")
    picture.line(785, y - 4, 820, y - 4, RED, dashes="2 3")
    picture.text(827, y, "all that the cores give")
    return picture.svg()


def panel(
    picture: Picture, found: Found, name: str, mode: str, left: float, top: float, side: float
) -> None:
    """One model, one way to scale; (left, top) is its corner."""
    low, high = -2.0, 3.0  # powers of two: a quarter to 8

    def x(world: float) -> float:
        return left + 16 + (side - 32) * math.log2(world) / 3

    def y(times: float) -> float:
        power = min(high, max(low, math.log2(times)))
        return top + side - (power - low) / (high - low) * side

    picture.rect(left, top, side, side, "none", PALE)
    picture.text(left + side / 2, top - 8, f"{name}, {mode} scaling", at="middle")
    for world in (1, 2, 4, 8):
        picture.text(x(world), top + side + 16, f"{world}", at="middle", size=11)
        picture.line(left - 4, y(world), left, y(world))
        picture.text(left - 8, y(world) + 4, f"{world}", at="end", size=11)
    for times, words in ((0.5, "1/2"), (0.25, "1/4")):
        picture.text(left - 8, y(times) + 4, words, at="end", size=11)
    picture.text(left + side / 2, top + side + 32, "processes", at="middle", size=11)
    picture.line(x(1), y(1), x(8), y(8), PALE, dashes="4 3")
    cores = min(4, found["cores"])
    picture.line(x(cores), y(cores), x(4), y(cores), RED, dashes="2 3")
    said = found["model"][name][mode]
    for world, model in said.items():
        bound = [
            speed(said["1"][end], model[end], mode, int(world)) for end in ("hidden", "in turn")
        ]
        upper, lower = y(max(bound)), y(min(bound))
        picture.rect(x(int(world)) - 5, upper, 10, max(lower - upper, 2), "#f0d3a8", COLOURS[1])
    for world, one in found["steps"][name][mode].items():
        speeds = one["of one process"]
        at = x(int(world))
        picture.line(at, y(min(speeds)), at, y(max(speeds)), COLOURS[0], width=2)
        picture.dot(at, y(statistics.median(speeds)), COLOURS[0])


def speed(first: float, seconds: float, mode: str, world: int) -> float:
    """Return samples per second, of one process's; a weak step has ``world`` times as many."""
    return (world if mode == "weak" else 1) * first / seconds


# -- what survives what -------------------------------------------------------------------------

#: What dies, the pods lost (of 0 and 1 on one node, 2 on another), and in words what follows.
LOSSES = (
    ("a process", (), "all processes start again,", "in their pods"),
    ("a pod", (1,), "a new pod; the others'", "processes start again"),
    ("a node", (0, 1), "new pods elsewhere; the others'", "processes start again"),
    ("the operator", (), "training goes on;", "decisions wait"),
)


def survives() -> str:
    """Draw a row for each loss: the operator, two nodes, three pods of two processes."""
    row, top, wide = 78, 62, 480
    picture = Picture(wide, top + row * len(LOSSES) + 4, "What survives what")
    x = 16.0
    for colour, words in ((RED, "dies"), (AGAIN, "starts again"), (TRAINS, "trains on")):
        picture.rect(x, 34, 14, 14, colour)
        picture.text(x + 20, 46, words)
        x += 48 + 6.5 * len(words)
    for number, (who, lost, *words) in enumerate(LOSSES):
        y = top + row * number
        picture.line(16, y, wide - 16, y, PALE)
        operator = who == "the operator"
        picture.rect(16, y + 26, 30, 30, RED if operator else "none", RED if operator else PALE)
        picture.text(31, y + 46, "op", at="middle", colour="white" if operator else GREY)
        for left, pods in ((56, (0, 1)), (170, (2,))):
            node = "#f6e3e0" if who == "a node" and pods == lost else "none"
            picture.rect(left, y + 16, 54 * len(pods) + 2, 50, node, PALE)
            for place, pod in enumerate(pods):
                at = left + 6 + 52 * place
                edge = RED if pod in lost else TRAINS
                picture.rect(at, y + 26, 44, 30, "white", edge)
                for rank in range(2):
                    dead = pod in lost or (who == "a process" and (pod, rank) == (1, 0))
                    colour = TRAINS if operator else RED if dead else AGAIN
                    picture.rect(at + 5 + 18 * rank, y + 33, 16, 16, colour)
        picture.text(242, y + 28, f"{who} dies", size=14)
        for line, said in enumerate(words):
            picture.text(242, y + 47 + 16 * line, said, size=13, colour=GREY)
    return picture.svg()


# -- the life of a gang -------------------------------------------------------------------------

#: Until when (pixels), what each of three pods does, and in words what begins there.
LIFE = (
    (40, (PALE, PALE, PALE), "kubectl apply: all pods get a node, or none", ""),
    (40, (AGAIN, AGAIN, AGAIN), "processes start and meet", ""),
    (80, (TRAINS, TRAINS, TRAINS), "training; every line is a snapshot", ""),
    (44, (AGAIN, RED, AGAIN), "a process is killed: all start again in place", "from the snapshot"),
    (70, (TRAINS, TRAINS, TRAINS), "repeated steps are compared, then new ones", ""),
    (50, (HELD, HELD, RED), "a pod is lost: a new one comes,", "the others wait"),
    (70, (TRAINS, TRAINS, TRAINS), "all train on, from the snapshot", ""),
    (44, (HELD, AGAIN, HELD), "a node is drained: a last snapshot first,", "nothing is repeated"),
    (70, (TRAINS, TRAINS, TRAINS), "all train on", ""),
    (30, (PALE, PALE, PALE), "Succeeded: the weights of an undisturbed run", ""),
)


def life() -> str:
    """Draw time downwards, a lane for each pod."""
    top, y = 66, 66.0
    picture = Picture(
        480, top + sum(part[0] for part in LIFE) + 14, "The life of a gang of three pods"
    )
    for pod in range(3):
        picture.text(32 + 46 * pod, top - 12, f"pod {pod}", at="middle", colour=GREY)
    for long, colours, *words in LIFE:
        for pod, colour in enumerate(colours):
            picture.rect(14 + 46 * pod, y, 36, long - 3, colour)
            marks = range(18, long - 6, 18) if colour == TRAINS else ()
            for mark in marks:
                picture.line(14 + 46 * pod, y + mark, 50 + 46 * pod, y + mark, "white", width=2)
        for line, said in enumerate(words):
            picture.text(164, y + 15 + 16 * line, said, size=13, colour=GREY if line else INK)
        y += long
    return picture.svg()


# -- where the hours of a real run went ---------------------------------------------------------


def goodput() -> str:
    """Draw the output of `kubectl ddp account` on its page: a bar, and each state's share."""
    page = (PICTURES.parent / "guides/goodput.md").read_text()
    pods, spent = re.findall(r"^Pods: +(\d+), (\S+) of pods", page, re.MULTILINE)[0]
    found = re.findall(r"^(\w+) +\S+ +([\d.]+)%", page, re.MULTILINE)
    shares = sorted(((float(share), state) for state, share in found), reverse=True)
    title = f"A job of {pods} pods with six faults: where {spent} of pods went"
    picture = Picture(480, 92 + 22 * math.ceil(len(shares) / 2), title)
    x, per_cent = 16.0, 448 / sum(share for share, _ in shares)
    palette = (TRAINS, "#8e6bb0", RED, "#7b8794", AGAIN, "#5aa7b6", "#4f9d69")
    for number, (share, state) in enumerate(shares):
        colour = palette[number] if number < len(palette) else PALE
        picture.rect(x, 36, share * per_cent, 34, colour)
        x += share * per_cent
        left, y = 16 + 240 * (number % 2), 84 + 22 * (number // 2)
        picture.rect(left, y, 12, 12, colour)
        picture.text(left + 20, y + 11, f"{share:g} % {state}", size=13)
    return picture.svg()


RECORDED = {"buckets": buckets, "ring": ring, "scaling": scaling}
DRAWN = {"survives": survives, "life": life, "goodput": goodput}


if __name__ == "__main__":
    for name, of_record in RECORDED.items():
        record = json.loads((HERE / f"{name}.json").read_text())
        (PICTURES / f"{name}.svg").write_text(of_record(record))
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw())
