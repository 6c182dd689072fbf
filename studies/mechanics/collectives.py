"""The collectives, with what goes in and what comes out, and a group of some of the ranks.

    ddpjob-trainer run --nproc 3 collectives.py
    torchrun --nproc-per-node 3 collectives.py

Plain torch.distributed, nothing of ours. Every rank of a group makes the same calls in the same
order; mismatch.py shows what happens otherwise.
"""

import math
import os
import time
import warnings

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
ROOT = 0  # the rank that gives, or gets


def mine() -> torch.Tensor:
    """What this rank brings: [1, 10], [2, 20], [3, 30], ..."""
    return torch.tensor([1.0, 10.0], device=device) * (rank + 1)


def show(name: str, result: object) -> None:
    if rank == ROOT:
        print(f"{name:<19} {result}", flush=True)


show(f"{world} ranks bring", [[r + 1, 10 * (r + 1)] for r in range(world)])

# --- Reductions: element by element over the ranks ---------------------------------------------
for op, expected in {
    dist.ReduceOp.SUM: [sum(range(1, world + 1)), 10 * sum(range(1, world + 1))],
    dist.ReduceOp.PRODUCT: [math.factorial(world), math.factorial(world) * 10**world],
    dist.ReduceOp.MIN: [1, 10],
    dist.ReduceOp.MAX: [world, 10 * world],
}.items():
    tensor = mine()
    dist.all_reduce(tensor, op=op)  # in place, on every rank
    assert torch.allclose(tensor.cpu(), torch.tensor(expected, dtype=torch.float32))
    show(f"all_reduce {str(op).rpartition('.')[2]}", tensor.tolist())

tensor = mine()
dist.reduce(tensor, ROOT)  # as all_reduce, but only ROOT may look: other ranks' is undefined
show("reduce", f"{tensor.tolist()} on rank {ROOT} only")

# --- From one to all, from all to one ---------------------------------------------------------
tensor = mine()
dist.broadcast(tensor, ROOT)
assert tensor.tolist() == [1, 10]
show("broadcast", tensor.tolist())

piece = torch.empty(1, device=device)
whole = list(torch.arange(world, device=device).float().split(1)) if rank == ROOT else None
dist.scatter(piece, whole, ROOT)  # the i-th piece of ROOT's list goes to rank i
assert piece == rank
show("scatter", f"rank {rank} has {piece.tolist()} of {list(range(world))}")

pieces = [torch.empty(2, device=device) for _ in range(world)] if rank == ROOT else None
dist.gather(mine(), pieces, ROOT)
if pieces is not None:
    assert [p[0] for p in pieces] == list(range(1, world + 1))
    show("gather", f"{[p.tolist() for p in pieces]} on rank {ROOT} only")

pieces = [torch.empty(2, device=device) for _ in range(world)]
dist.all_gather(pieces, mine())
assert [p[0] for p in pieces] == list(range(1, world + 1))
show("all_gather", [p.tolist() for p in pieces])

# --- From all to all: each rank gives one piece to every rank ------------------------------------
# reduce_scatter adds up what a rank is given. all_gather after it makes an all_reduce: see ring.py.
warnings.filterwarnings("ignore", ".*reduce_scatter")  # newer PyTorch warns of its internal call
tensor = torch.empty(2, device=device)
dist.reduce_scatter(tensor, [mine() * (r + 1) for r in range(world)])
assert tensor[0] == (rank + 1) * sum(range(1, world + 1))
show("reduce_scatter", f"rank {rank} has {tensor.tolist()}, rank r has r + 1 times as much")

row = torch.arange(world, device=device).float() + 10 * rank
column = torch.empty_like(row)
dist.all_to_all_single(column, row)  # a matrix of which each rank has a row, transposed
assert column.tolist() == [10 * r + rank for r in range(world)]
show("all_to_all", f"rank {rank} gave {row.tolist()} and has {column.tolist()}")

# --- A group: some of the ranks -----------------------------------------------------------------
# new_group() is itself a collective: every rank calls it, also those that will not be in it.
members = list(range(0, world, 2))
even = dist.new_group(members)
if rank in members:
    tensor = mine()
    dist.all_reduce(tensor, group=even)
    assert tensor[0] == sum(r + 1 for r in members)
    show("all_reduce, group", f"{tensor.tolist()} over ranks {members}")

# --- barrier: nobody leaves before all have come -------------------------------------------------
time.sleep(0.2 * rank)  # the last rank comes latest
came = time.monotonic()
dist.barrier()
left = time.monotonic()
times = [torch.empty(2, dtype=torch.float64, device=device) for _ in range(world)]
dist.all_gather(times, torch.tensor([came, left], dtype=torch.float64, device=device))
if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:  # one machine: one clock
    assert max(t[0] for t in times) <= min(t[1] for t in times)
show("barrier", "waited " + ", ".join(f"{float(t[1] - t[0]):.2f} s" for t in times))

del even  # who holds a group keeps its threads
dist.destroy_process_group()
