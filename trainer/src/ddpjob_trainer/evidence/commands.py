"""Show what each round left, who failed first and who followed: `ddpjob-trainer evidence`.

cli.py calls it. Reads only; safe beside a running job. Files come from a volume that others may
write: what does not parse counts as absent, and everything is bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from ddpjob_contract.evidence import (
    EVIDENCE_DIR,
    EVIDENCE_MAX_BYTES,
    EVIDENCE_TIME,
    EVIDENCE_VERSION,
    End,
    Evidence,
    Incident,
    RankEnd,
)
from ddpjob_trainer import printing
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.evidence import folder
from ddpjob_trainer.evidence.folder import MOST_FILE, Seen

# --- Rounds ---------------------------------------------------------------------------------------

_FILE: Final = re.compile("replica-[0-9]{1,6}\\.json")
_MOST_FILES: Final = 20_000
_LAST_LINES: Final = 30  # of the first process, in an Incident
_TAILS: Final = 16  # pods whose last lines are in it, those that were lost before others
_TAIL_LINES: Final = 8
_TAIL_CHARACTERS: Final = 200
_ENDS: Final = get_args(End)


@dataclass(frozen=True, slots=True)
class Round:
    """The files of one round, by replica, and the names of other files in their folder."""

    seen: Seen
    files: Sequence[Evidence]
    names: Sequence[str]

    @property
    def nproc(self) -> int:
        """Return the processes of a launcher."""
        return self.files[0]["nproc"]


def rounds(
    root: Path, uid: str | None = None, *, attempt: int | None = None, round_: int | None = None
) -> Iterator[Round]:
    """Yield the rounds that have evidence, the newest first. Raises OSError.

    ``attempt``: of pods; the hub may be older. So these are rounds of the hubs until then in which
    no younger pod served, those of the youngest hub first.
    """
    found = [seen for seen in folder.find(root) if round_ in (None, seen.folder.round)]
    if uid is not None:
        job = folder.round_folder(uid, 0, 0).job
        found = [seen for seen in found if seen.folder.job == job]
    if attempt is not None:
        found = [seen for seen in found if seen.folder.attempt <= attempt]
        found.sort(key=lambda seen: seen.folder.attempt, reverse=True)
    for seen in found:
        one = _round(root, seen)
        made = max((file.get("made", 0) for file in one.files), default=0)
        if one.files and (attempt is None or made <= attempt):
            yield one


def _round(root: Path, seen: Seen) -> Round:
    files: list[Evidence] = []
    names: list[str] = []
    with contextlib.suppress(OSError), folder.opened(root, seen.folder.name) as fd:
        names = sorted(os.listdir(fd))  # noqa: PTH208 - relative to a descriptor
        for name in [name for name in names if _FILE.fullmatch(name)][:_MOST_FILES]:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                files.append(_parsed(folder.read(fd, name, MOST_FILE), seen))
    return Round(seen, sorted(files, key=lambda one: one["replica"]), names)


#: What each file has, and of which type; the rest is optional.
_NEEDED: Final[Mapping[str, type]] = {
    "uid": str, "attempt": int, "round": int, "replica": int, "nproc": int,
    "pod": str, "state": str, "began": str, "at": str, "ranks": list,
}  # fmt: skip
_OPTIONAL: Final[Mapping[str, type]] = {
    "made": int, "why": str, "signal": int, "cause": dict, "lost": dict, "report": dict,
    "stacks": str, "flight": list, "curves": dict,
}  # fmt: skip
_OF_RANK: Final[Mapping[str, type]] = {
    "code": int, "signal": int, "exception": str, "step": int, "snapshotStep": int,
}  # fmt: skip


def _parsed(data: bytes, seen: Seen) -> Evidence:
    """Check a file. Raises ValueError for one of another format, job or round."""
    body = json.loads(data)
    if not isinstance(body, dict) or body.get("version") != EVIDENCE_VERSION:
        raise ValueError("not of this version")
    if any(type(body.get(name)) is not kind for name, kind in _NEEDED.items()):
        raise ValueError("a field is missing")
    if folder.round_folder(body["uid"], body["attempt"], body["round"]) != seen.folder:
        raise ValueError("it belongs to another round or job")
    if body["nproc"] < 1:
        raise ValueError("no processes")
    if not all(EVIDENCE_TIME.fullmatch(body[name]) for name in ("began", "at")):
        raise ValueError("a time is none")
    found = {name: body[name] for name in ("version", *_NEEDED)}
    found |= {k: body[k] for k, kind in _OPTIONAL.items() if type(body.get(k)) is kind}
    found["ranks"] = [_rank(one) for one in body["ranks"] if _is_rank(one)]
    found["flight"] = [str(one) for one in found.get("flight", [])]
    found["lost"] = {str(k): str(v) for k, v in found.get("lost", {}).items()}
    return cast("Evidence", found)


def _is_rank(one: Any) -> bool:
    return isinstance(one, dict) and type(one.get("rank")) is int and one.get("end") in _ENDS


def _rank(one: Mapping[str, Any]) -> RankEnd:
    found = {k: one[k] for k, kind in _OF_RANK.items() if type(one.get(k)) is kind}
    log = one.get("log")
    lines = [str(line) for line in log] if isinstance(log, list) else []
    return cast("RankEnd", {"rank": one["rank"], "end": one["end"], "log": lines, **found})


def incident(found: Round) -> Incident:
    """Summarize a round: causes, ranks by their end, pods."""
    files = found.files
    ranks = [rank for one in files for rank in one["ranks"]]
    ends = {end: sorted(one["rank"] for one in ranks if one["end"] == end) for end in _ENDS}
    over, silent = _split(files)
    lost = next((one["lost"] for one in files if one["lost"]), {})
    gone = [one for one in files if one in silent or str(one["replica"]) in lost]
    gone += [one for one in files if one not in gone]
    facts: dict[str, Any] = {
        "uid": files[0]["uid"],
        "attempt": files[0]["attempt"],
        "round": files[0]["round"],
        "began": min(one["began"] for one in files),
        "at": min((one["at"] for one in over), default=max(one["at"] for one in files)),
        "cause": _cause(files),
        "why": _why(over),
        "lost": lost,
        "signal": next((one["signal"] for one in files if one.get("signal")), None),
        "silent": {one["pod"]: one["at"] for one in silent} if over else None,
        "tails": {one["pod"]: _tail(one) for one in gone[:_TAILS]},
        "nproc": found.nproc,
        "curves": next((one["curves"] for one in files if one.get("curves")), None),
        "step": _most(ranks, "step"),
        "snapshotStep": _most(ranks, "snapshotStep"),
        "pods": {one["pod"]: one["replica"] for one in files},
        "stacks": [one["replica"] for one in files if one.get("stacks")],
        "flight": [name for name in found.names if name.endswith(".nccl.gz")],
        **ends,
    }
    if first := first_of(files):
        file, rank = first
        facts["first"] = {**rank, "log": rank["log"][-_LAST_LINES:]}
        facts |= {"firstReplica": file["replica"], "firstPod": file["pod"]}
    kept = {name: value for name, value in facts.items() if value not in (None, [], {})}
    return cast("Incident", kept)


def _most(ranks: Sequence[RankEnd], name: Literal["step", "snapshotStep"]) -> int | None:
    return max((step for one in ranks if (step := one.get(name)) is not None), default=None)


def first_of(files: Sequence[Evidence]) -> tuple[Evidence, RankEnd] | None:
    """Return the process that failed first, as the hub says, else as it looks.

    Then a process that failed by itself comes before one of a pod that is silent or was lost.
    """
    everybody = [(file, rank) for file in files for rank in file["ranks"]]
    cause = _cause(files) or {}
    alone = [pair for pair in everybody if pair[1]["end"] != "followed"]
    named = [pair for pair in alone if pair[1]["rank"] == cause.get("rank")]
    failed = [pair for pair in everybody if pair[1]["end"] == "failed"]
    failed.sort(key=lambda pair: (pair[0]["at"], pair[1]["rank"]))
    over, silent = _split(files)
    lost = [cause.get("replica"), *(one["replica"] for one in silent if over)]
    gone = [pair for pair in everybody if pair[0]["replica"] in lost]
    return next(iter([*named, *failed, *gone]), None)


def _split(files: Sequence[Evidence]) -> tuple[list[Evidence], list[Evidence]]:
    """Return the files of launchers that have ended the round, and those of others."""
    over = [one for one in files if one["state"] == "over"]
    return over, [one for one in files if one["state"] != "over"]


def _tail(one: Evidence) -> list[str]:
    lines = one["ranks"][0]["log"] if one["ranks"] else []
    return [line[:_TAIL_CHARACTERS] for line in lines[-_TAIL_LINES:]]


def _cause(files: Sequence[Evidence]) -> Any:
    """Return the word of the hub that most launchers have, the longest record of these."""
    causes = [one["cause"] for one in files if one.get("cause")]
    if not causes:
        return None
    counted = Counter(json.dumps(cause.get("rank")) for cause in causes)
    most = counted.most_common(1)[0][0]
    return max((c for c in causes if json.dumps(c.get("rank")) == most), key=len)


def _why(over: Sequence[Evidence]) -> str | None:
    """Return the launchers' commonest words on why the round ended."""
    said = Counter(one["why"] for one in over if one.get("why"))
    return said.most_common(1)[0][0] if said else None


# --- Commands: ls and show ------------------------------------------------------------------------

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
        epilog=_EPILOG,
        description=f"Look at {about}. Reads only; safe beside a running job.",
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
    found = [incident(one) for one in _rounds(root, uid)]
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
        for one in rounds(root, uid, attempt=attempt, round_=round_):
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
            printing.show(*_round_text(found, rank))
            return 0
    raise ConfigError(f"no evidence of rank {rank} there: `ddpjob-trainer evidence ls` lists it")


def _has(file: Evidence, rank: int | None) -> bool:
    return rank is None or any(one["rank"] == rank for one in file["ranks"])


def _round_text(found: Round, rank: int | None) -> Iterator[str]:
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
        yield f"--- its folder: {EVIDENCE_DIR}/{found.seen.folder.name}"
