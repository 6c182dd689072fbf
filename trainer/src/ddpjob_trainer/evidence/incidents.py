"""Read the evidence of each round, and say who failed first and who only followed.

commands.py calls it. Files come from a volume that others may write: what does not parse counts as
absent, and everything is bounded.
"""

from __future__ import annotations

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
    EVIDENCE_TIME,
    EVIDENCE_VERSION,
    End,
    Evidence,
    Incident,
    RankEnd,
)
from ddpjob_trainer.evidence import folder
from ddpjob_trainer.evidence.bounds import MOST_FILE
from ddpjob_trainer.evidence.folder import Seen

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
    found = [
        seen
        for seen in folder.find(root)
        if (attempt is None or seen.place.attempt <= attempt)
        and round_ in (None, seen.place.round)
        and (uid is None or seen.place == folder.place(uid, seen.place.attempt, seen.place.round))
    ]
    if attempt is not None:
        found.sort(key=lambda seen: seen.place.attempt, reverse=True)
    for seen in found:
        one = _round(root, seen)
        made = max((file.get("made", 0) for file in one.files), default=0)
        if one.files and (attempt is None or made <= attempt):
            yield one


def _round(root: Path, seen: Seen) -> Round:
    files: list[Evidence] = []
    names: list[str] = []
    with contextlib.suppress(OSError), folder.opened(root, seen.place.name) as fd:
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
    "stacks": str, "flight": list,
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
    if folder.place(body["uid"], body["attempt"], body["round"]) != seen.place:
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
    told: dict[str, Any] = {
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
        "step": _most(ranks, "step"),
        "snapshotStep": _most(ranks, "snapshotStep"),
        "pods": {one["pod"]: one["replica"] for one in files},
        "stacks": [one["replica"] for one in files if one.get("stacks")],
        "flight": [name for name in found.names if name.endswith(".nccl.gz")],
        **ends,
    }
    if first := first_of(files):
        file, rank = first
        told |= {
            "first": {**rank, "log": rank["log"][-_LAST_LINES:]},
            "firstReplica": file["replica"],
            "firstPod": file["pod"],
        }
    kept = {name: value for name, value in told.items() if value not in (None, [], {})}
    return cast("Incident", kept)


def _most(ranks: Sequence[RankEnd], name: Literal["step", "snapshotStep"]) -> int | None:
    return max((step for one in ranks if (step := one.get(name)) is not None), default=None)


def first_of(files: Sequence[Evidence]) -> tuple[Evidence, RankEnd] | None:
    """Return the process that failed first, as the hub says, else as it looks.

    Then a process that failed by itself comes before one of a pod that is silent or was lost.
    """
    everybody = [(file, rank) for file in files for rank in file["ranks"]]
    cause = _cause(files) or {}
    named = [
        p for p in everybody if p[1]["rank"] == cause.get("rank") and p[1]["end"] != "followed"
    ]
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
