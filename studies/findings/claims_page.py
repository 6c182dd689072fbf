"""Make studies/claims.md of claims.json and scaling.json beside it."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from harness import report

from findings import claims_verdicts, counted

HEAD = """# What is said of DataParallel and DDP

True, false, when, or not shown: each claim with its figure. `studies/claims.py` counts and
measures, computes the verdicts and writes this page; all figures are in studies/claims.json,
those of scaling in studies/scaling.json. {machine}

**What is what.** Without GPUs nn.DataParallel only calls its module. So *DP* here is its
steps done by hand (`studies/programs/replicas.py`): the batch scattered, the module replicated,
forward and backward in one thread per replica under one GIL, outputs gathered, gradients added up
on the first replica, replicas thrown away. DDP is torch's own, over gloo. Both have {replicas}
replicas, one intra-op thread for each, the same whole batch, float32 and AdamW. Copies between
replicas of DP are copies in memory, as cheap as they get; on GPUs they cross PCIe or NVLink. Facts
(who holds, sends and calls what) are counted at {ranks} ranks; they do not depend on the machine,
and `tests/trainer/test_studies.py` holds them. A speed counts as faster from {faster} times on. A
claim about speeds that holds for some of the models is "when"; one that holds for none of them here
is "not shown", for GPUs and networks may bear it out. *Row* is the number of the claim in
the list of what this project was asked to settle.

"""

SPEEDS = """
## Steps per second

*One process* computes the whole batch with one thread: the floor. Every repeat runs each way once,
in an order that turns; ratios are taken within a repeat; medians with the range.

"""

PHASES = """
Milliseconds of DP's step, by hand. Reduce is the sum on the first replica; forward and backward run
in {replicas} threads.

"""

HELD = """
## Bytes held and moved

Per rank of DDP at {ranks} ranks, in multiples of the parameters' bytes; the most of any rank.
Activations, which are the same for all, are left out.

"""

END = """
## Not measured: GPUs

No figure here comes from a GPU: not nn.DataParallel itself, its peer-to-peer copies, NCCL, or peaks
of GPU memory per device. Where torch sees two or more, one command runs nn.DataParallel and DDP
over NCCL on all of them, the same three models with larger batches, and tells the peak of each
device:

```
.venv/bin/python studies/claims.py --gpus
```

## Again

```
.venv/bin/python studies/claims.py --json studies/claims.json --page studies/claims.md
```

It takes about {minutes} minutes on 2 cores that do nothing else, and reads
studies/scaling.json for row 30: run `studies/scaling.py` first.
"""
MINUTES = 4
KINDS = ("parameters", "gradients", "buckets", "optimizer state")


def page(found: Mapping[str, Any], scaling: Mapping[str, Any]) -> str:
    claims = claims_verdicts.claims(found, scaling)
    ways = found["ways"]
    parts = tuple(next(iter(ways.values()))["dp's phases"])
    return "".join(
        (
            HEAD.format(
                machine=report.text(found["machine"]),
                replicas=found["replicas"],
                ranks=found["facts"]["ranks"],
                faster=claims_verdicts.FASTER,
            ),
            report.markdown(
                ("row", "claim", "verdict"),
                ((claim.row, claim.said, f"**{claim.verdict}**") for claim in claims),
            ),
            *map(paragraph, claims),
            SPEEDS,
            report.markdown(
                ("model", "one process", "DP by hand", "DDP", "DDP over DP"), speeds(ways)
            ),
            PHASES.format(replicas=found["replicas"]),
            report.markdown(
                ("model", *parts),
                (
                    (name, *(f"{1000 * one[part]:.2f}" for part in parts))
                    for name, one in ((name, way["dp's phases"]) for name, way in ways.items())
                ),
            ),
            HELD.format(ranks=found["facts"]["ranks"]),
            report.markdown(("way", *KINDS), held(found["facts"])),
            END.format(minutes=MINUTES),
        )
    )


def paragraph(claim: claims_verdicts.Claim) -> str:
    words = (
        f"**{claim.said}** Row {claim.row}: *{claim.verdict}*. {claim.figure}",
        f"Why: {claim.why}",
    )
    return "\n" + "\n\n".join(map(_wrapped, words)) + "\n"


_wrapped = functools.partial(
    textwrap.fill, width=108, break_long_words=False, break_on_hyphens=False
)


def speeds(ways: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, found in ways.items():
        spreads = (report.spread(found["steps per second"][way], 1) for way in ("one", "dp", "ddp"))
        yield (name, *spreads, report.spread(found["ddp of dp"], 2))


def held(facts: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for how in facts["held"]:
        most = (max(counted.held(facts, how, what)) for what in KINDS)
        yield (how, *(f"{value:.2f}" for value in most))
