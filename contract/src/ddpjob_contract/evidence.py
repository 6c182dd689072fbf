"""Define what launchers leave of each round beside the snapshots, for people who come later.

A launcher writes Evidence, a file for each round. `ddpjob-trainer evidence` reads all files of a
round as an Incident, and the plugin gets that as JSON.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypedDict

from ddpjob_contract import Round, TerminationReport

EVIDENCE_VERSION: Final = 1
#: Below the job's snapshots.
EVIDENCE_DIR: Final = "evidence"
#: `ddpjob-trainer evidence ls --json` prints no more, for the plugin.
EVIDENCE_MAX_BYTES: Final = 1 << 20

#: How ``began`` and ``at`` are written.
EVIDENCE_TIME: Final = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")

#: followed: with exit code 75, its peers were gone first. stopped: by its launcher, for the others.
#: running: its launcher has not written how it ended, or it has not.
End = Literal["failed", "followed", "stopped", "succeeded", "running"]


class RankEnd(TypedDict, total=False):
    """One process: how it ended, and its last lines."""

    rank: int
    end: End
    code: int  # exit status, 128+n for signal n
    signal: int
    exception: str
    step: int  # finished steps
    snapshotStep: int  # of the newest committed snapshot that it knew of
    log: list[str]


class Evidence(TypedDict, total=False):
    """What one launcher knows of one round."""

    version: int
    uid: str  # of the job
    attempt: int  # the hub's number
    round: int
    made: int  # the attempt in which the pod was made
    pod: str
    replica: int  # served in this round
    nproc: int
    state: Literal["running", "over"]
    began: str  # RFC 3339, UTC, as all times
    at: str  # when this was written
    why: str  # why it ended, in the launcher's words
    signal: int  # by which the launcher was to end
    cause: Round  # what ended the round, by the hub
    lost: dict[str, str]  # of the hub: replicas whose launchers it lost in this round, and how
    report: TerminationReport
    ranks: list[RankEnd]
    stacks: str  # of all threads of processes that hung or waited
    curves: dict[str, list[list[float]]]  # of rank 0: some pairs of step and value, by name
    flight: list[str]  # copies of NCCL's flight recorder in the same folder, or why there is none


class Incident(TypedDict, total=False):
    """One round, from the files of all its launchers.

    ``first``: the process that failed first, or the first one of the pod that was lost.
    """

    uid: str
    attempt: int
    round: int
    began: str
    at: str
    cause: Round
    why: str
    lost: dict[str, str]
    signal: int
    first: RankEnd
    firstReplica: int
    firstPod: str
    failed: list[int]  # ranks, as in End
    followed: list[int]
    stopped: list[int]
    succeeded: list[int]
    running: list[int]
    silent: dict[str, str]  # pods without a word on their end, while others have one: since when
    step: int  # the most that a process had finished
    snapshotStep: int
    nproc: int  # processes of a pod
    tails: dict[str, list[str]]  # of some pods that are silent or lost: last lines
    pods: dict[str, int]  # the replica that each served
    stacks: list[int]  # replicas that have some
    curves: dict[str, list[list[float]]]  # as in Evidence
    flight: list[str]
