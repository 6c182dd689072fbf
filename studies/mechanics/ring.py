"""All-reduce as a ring, written out, and what both it and the library put on the wire.

    ddpjob-trainer run --nproc 3 ring.py
    torchrun --nproc-per-node 3 ring.py --numbers 1000003

Plain torch.distributed, nothing of ours. The tensor is cut into W chunks, W being the number of
ranks. First each chunk travels round once and is added to on its way (reduce-scatter): after W - 1
steps every rank has one chunk that is complete. Then the complete ones travel round (all-gather).
So each rank sends 2 (W - 1) chunks of N / W bytes: nearly 2 N, however many ranks there are, and
all at the same time. That no rank is the centre is the point.
"""

import argparse
import os
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--numbers", type=int, default=1_000_000, help="of 4 bytes (1000000)")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Sum over all ranks, in place; return the bytes that this rank has sent."""
    chunks = list(tensor.tensor_split(world))  # views: the lengths may differ by one
    right, left = (rank + 1) % world, (rank - 1) % world
    sent = 0

    def pass_on(out: torch.Tensor, into: torch.Tensor) -> None:
        nonlocal sent
        # Both at once: if everyone first sent and then received, all might wait for one another.
        ops = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        sent += out.nbytes

    for step in range(world - 1):  # reduce-scatter
        mine = chunks[(rank - step - 1) % world]
        arriving = torch.empty_like(mine)
        pass_on(chunks[(rank - step) % world], arriving)
        mine += arriving
    for step in range(world - 1):  # all-gather: chunk rank + 1 is the one that is complete here
        pass_on(chunks[(rank + 1 - step) % world], chunks[(rank - step) % world])
    return sent


def bytes_sent() -> int | None:
    """What this process's TCP connections have sent so far, as the kernel counts it.

    TCP_INFO's tcpi_bytes_sent less tcpi_bytes_retrans, since Linux 4.19; None where there are
    none. What NCCL moves over NVLink, shared memory or InfiniBand is not TCP and not in it.
    """
    dist.barrier()  # what the others have received has left this process, not only been written
    total, found = 0, False
    for open_file in Path("/proc/self/fd").iterdir():
        try:
            if not str(open_file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(open_file.name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not TCP, or closed in between
            continue
        if len(info) >= 216:
            sent, again = struct.unpack_from("QQ", info, 200)
            total, found = total + sent - again, True
    return total if found else None


torch.manual_seed(rank)
whole = torch.randint(-1000, 1000, (args.numbers,), device=device).float()  # their sums are exact
by_hand, by_library = whole.clone(), whole.clone()
dist.all_reduce(torch.zeros(1, device=device))  # connections are made at the first call

before = bytes_sent()
counted = ring_all_reduce(by_hand)
between = bytes_sent()
dist.all_reduce(by_library)
after = bytes_sent()

assert torch.equal(by_hand, by_library)
formula = 2 * whole.nbytes * (world - 1) / world
assert abs(counted - formula) <= 2 * 4 * world  # the chunks' lengths differ by one number at most


def each(value: int | None) -> list[int | None]:
    values: list[int | None] = [None] * world
    dist.all_gather_object(values, value)
    return values


kernel = each(between - before if before is not None and between is not None else None)
library = each(after - between if after is not None and between is not None else None)
sums = each(counted)

# Fractions are rounded at each addition, and another order of additions rounds otherwise.
fractions = torch.rand(args.numbers, device=device)
ours, theirs = fractions.clone(), fractions.clone()
ring_all_reduce(ours)
dist.all_reduce(theirs)
difference = float((ours - theirs).abs().max())

if rank == 0:
    unknown = "cannot be measured here"
    print(f"{world} ranks, N = {whole.nbytes} bytes: sums of integers equal, number by number")
    print(f"2 N (W-1) / W              {formula:.0f}")
    print(f"sent by the ring, by rank  {sums}")
    tcp = not gpu and None not in kernel + library  # NCCL's ways past TCP are not counted
    print(f"the same, by the kernel    {kernel if tcp else unknown}")
    print(f"all_reduce, by the kernel  {library if tcp else unknown}")
    print(f"sums of fractions differ by at most {difference:.1e}", flush=True)
dist.destroy_process_group()
