"""A ring all-reduce written out, with a record of the sender and receiver of each chunk.

First reduce-scatter: in W - 1 steps each chunk goes once round the ring and is added up on its
way. Then all-gather: in W - 1 steps the finished chunks go round. Each rank sends 2 (W - 1) chunks
of N / W bytes: 2 N (W - 1) / W, whatever its number. The result is held against torch's own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Sends = list[dict[str, Any]]


def ring_all_reduce(tensor: torch.Tensor) -> Sends:
    """Sum ``tensor`` over all ranks in place; what this rank sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    chunks = list(tensor.chunk(world))
    sends: Sends = []
    for step in range(2 * (world - 1)):
        adding = step < world - 1
        out = (rank - step) % world if adding else (rank + 1 - (step - world + 1)) % world
        come = (out - 1) % world
        got = torch.empty_like(chunks[come])
        sending = dist.isend(chunks[out], right)
        dist.recv(got, left)
        sending.wait()
        sends.append(
            {
                "step": step, "from": rank, "to": right, "chunk": out,
                "bytes": chunks[out].nbytes, "phase": "reduce-scatter" if adding else "all-gather",
                "value": float(chunks[out][0]),
            }
        )  # fmt: skip
        if adding:
            chunks[come] += got
        else:
            chunks[come].copy_(got)
    return sends


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=4096, help="float32 values to sum")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    # Whole numbers: any order of adding them up gives the same bits.
    source = torch.Generator().manual_seed(dist.get_rank())
    mine = torch.randint(0, 100, (args.values,), generator=source).float()
    theirs = mine.clone()
    dist.all_reduce(theirs)
    ring_all_reduce(mine)
    # One bit per rank: the value of a chunk tells whose numbers it holds.
    marked = torch.full((args.values,), float(1 << dist.get_rank()))
    sends = ring_all_reduce(marked)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (sends, torch.equal(mine, theirs)))
    if dist.get_rank() == 0:
        record = {
            "ranks": dist.get_world_size(),
            "bytes": mine.nbytes,
            "equal to torch's all_reduce": all(equal for _, equal in everyone),
            "sends": sorted(
                (one for sent, _ in everyone for one in sent), key=lambda s: (s["step"], s["from"])
            ),
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
