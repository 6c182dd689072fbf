"""Show what is left of earlier rounds: `ddpjob-trainer evidence ls|show`.

cli.py calls it. Reads only; safe beside a running job.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddpjob_contract.evidence import EVIDENCE_DIR, EVIDENCE_MAX_BYTES, Evidence, Incident, RankEnd
from ddpjob_trainer import printing
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.evidence import incidents
from ddpjob_trainer.evidence.incidents import Round

_MOST_SHOWN = 16  # ranks of one end, named in the list
_MOST_CELL = 160  # characters of a text in it
_OLDER = (
    "(nothing is kept by the number {attempt}: where attempt {attempt} replaced lost pods only, its"
    " rounds are those of attempt {hub}, as here)"
)
_EPILOG = """\
examples:
  ddpjob-trainer evidence ls /snapshots/digits                          a line per round
  ddpjob-trainer evidence show /snapshots/digits                        the newest round
  ddpjob-trainer evidence show /snapshots/digits --attempt 3 --rank 7   of one process
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    about = "last lines, ends and stacks of earlier rounds, kept beside the snapshots"
    top = commands.add_parser(
        "evidence",
        help=about,
        description=f"Look at {about}. Reads only; safe beside a running job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    where = "the snapshot directory: <spec.snapshot.path>/<job name>, or the URL of uploads"
    for verb, text in {"ls": "list the rounds", "show": "print what one round left"}.items():
        one = verbs.add_parser(verb, help=text, description=f"{text[0].upper()}{text[1:]}.")
        one.add_argument("directory", metavar="DIR", help=where)
        one.add_argument("--uid", metavar="UID", help="of the job with this uid only")
        if verb == "ls":
            one.add_argument("--json", action="store_true", help="for programs")
    one.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
    one.add_argument("--round", type=int, metavar="N", help="default: the newest")
    one.add_argument("--rank", type=int, metavar="N", help="this process only (default: all)")


def main(options: argparse.Namespace, directory: Path) -> int:
    """Run the command; return its exit code."""
    try:
        if options.verb == "ls":
            return ls(directory, options.uid, as_json=options.json)
        given = {"attempt": options.attempt, "round_": options.round}
        return show(directory, options.uid, rank=options.rank, **given)
    except ConfigError as error:
        printing.warn(f"ddpjob-trainer: {error}")
        return 1


def ls(root: Path, uid: str | None = None, *, as_json: bool = False) -> int:
    """Print one line per round, newest last, or all as JSON; return 0."""
    found = [incidents.incident(one) for one in _rounds(root, uid)]
    if as_json:
        printing.show(_json(found))
        return 0
    head = ("ATTEMPT", "ROUND", "WRITTEN", "JOB", "FIRST", "OTHERS")
    rows = [
        (str(one["attempt"]), str(one["round"]), one["at"], one["uid"][:8], _first(one), _rest(one))
        for one in reversed(found)
    ]
    sizes = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(size) for cell, size in zip(row, sizes, strict=True))
        printing.show("  ".join(cells).rstrip())
    return 0


def _rounds(
    root: Path, uid: str | None, *, attempt: int | None = None, round_: int | None = None
) -> Iterator[Round]:
    """Read one round after the other, newest first; raise ConfigError where there are none."""
    found = False
    try:
        for one in incidents.rounds(root, uid, attempt=attempt, round_=round_):
            found = True
            yield one
    except FileNotFoundError:
        if not root.is_dir():
            raise ConfigError(
                f"{root}: no such directory: name the job's, <spec.snapshot.path>/<job name>"
            ) from None
    except OSError as error:
        raise ConfigError(f"{root / EVIDENCE_DIR} cannot be read: {error.strerror}") from None
    if not found:
        which = f" of the job with uid {uid}" if uid else ""
        which += "" if attempt is None else f" of attempt {attempt}"
        which += "" if round_ is None else f" round {round_}"
        raise ConfigError(
            f"{root} has no evidence{which}: launchers write it, for the newest rounds only;"
            " `ddpjob-trainer evidence ls DIR` lists them"
        )


def _json(found: Sequence[Incident]) -> str:
    """Encode as many of the newest as fit into what the plugin reads."""
    kept = list(found)
    while (text := json.dumps({"incidents": kept})) and len(text) > EVIDENCE_MAX_BYTES:
        kept.pop()
    return text


def _first(one: Incident) -> str:
    if first := one.get("first"):
        return f"rank {first['rank']} ({in_words(first)})"
    if lost := one.get("lost"):
        return f"replica {', '.join(lost)} {next(iter(lost.values()))}"[:_MOST_CELL]
    return "-"


def _rest(one: Incident) -> str:
    parts = []
    first = one["first"]["rank"] if "first" in one else -1
    ends = {
        "failed": one.get("failed", []),
        "followed": one.get("followed", []),
        "stopped": one.get("stopped", []),
        "running": one.get("running", []),
        "succeeded": one.get("succeeded", []),
    }
    for end, everybody in ends.items():
        ranks = [rank for rank in everybody if rank != first]
        shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
        more = ", ..." if len(ranks) > _MOST_SHOWN else ""
        parts += [f"{end}: {shown}{more}"] if ranks else []
    return "; ".join(parts)


def in_words(rank: RankEnd) -> str:
    """Word a process's end: signal 9, or exit code 1: ValueError: no."""
    how = f"signal {rank['signal']}" if "signal" in rank else f"exit code {rank.get('code', '?')}"
    if rank["end"] == "running":
        how = "its end was not written"
    said = " ".join(rank.get("exception", "").split())
    return f"{how}: {said[:_MOST_CELL]}" if said else how


def show(
    root: Path,
    uid: str | None = None,
    *,
    attempt: int | None = None,
    round_: int | None = None,
    rank: int | None = None,
) -> int:
    """Print last lines and stacks of one round, all ranks or one; return 0."""
    for found in _rounds(root, uid, attempt=attempt, round_=round_):
        if any(_has(file, rank) for file in found.files):
            if attempt not in (None, found.files[0]["attempt"]):
                printing.show(_OLDER.format(attempt=attempt, hub=found.files[0]["attempt"]))
            printing.show(*_told(found, rank))
            return 0
    raise ConfigError(f"no evidence of rank {rank} there: `ddpjob-trainer evidence ls` lists it")


def _has(file: Evidence, rank: int | None) -> bool:
    return rank is None or any(one["rank"] == rank for one in file["ranks"])


def _told(found: Round, rank: int | None) -> Iterator[str]:
    for file in found.files:
        if not _has(file, rank):
            continue
        where = f"attempt {file['attempt']}, round {file['round']}"
        yield f"=== {file['pod']}: replica {file['replica']}, {where}, written {file['at']}"
        if why := file.get("why"):
            yield f"    {why}"
        for one in file["ranks"]:
            if rank in (None, one["rank"]):
                after = f", after step {one['step']}" if "step" in one else ""
                yield f"--- rank {one['rank']}: {one['end']}, {in_words(one)}{after}"
                yield from one["log"]
        if stacks := file.get("stacks"):
            yield f"--- stacks of {file['pod']}"
            yield from stacks.splitlines()
        for flight in file.get("flight", []):
            yield f"--- flight recorder: {flight}"
    if any(name.endswith(".nccl.gz") for name in found.names):
        yield f"--- its folder: {EVIDENCE_DIR}/{found.seen.place.name}"
