"""What a launcher does: one process per rank, and four words in the environment of each.

    python spawn.py
    python spawn.py --nproc 4

Plain torch.distributed, nothing of ours. torchrun and `ddpjob-trainer run` do the same for a script
that knows nothing of it, watch the processes, and start them on several machines, where all must
know one address. Here the script starts its own: for a notebook or a test, not for a cluster.
"""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing


def work(rank: int, world: int, port: int) -> None:
    """What each process runs; a launched script's whole file."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where rank 0 is: others ask there for one another
    os.environ["MASTER_PORT"] = str(port)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
    if rank == 0:
        time.sleep(0.5)  # it may come last: the others wait for it
    began = time.monotonic()
    # Waits until all have come. Without the four words: init_method="tcp://...", rank=, world_size=
    dist.init_process_group("gloo")
    waited = time.monotonic() - began
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    assert tensor == sum(range(1, world + 1))
    seen: list[tuple[int, int, float]] = [(0, 0, 0.0)] * world
    dist.all_gather_object(seen, (rank, os.getpid(), waited))
    if rank == 0:
        for other, pid, seconds in seen:
            print(f"rank {other} is process {pid} and waited {seconds:.1f} s for the others")
        print(f"all_reduce over {world} processes: {tensor.item():.0f}", flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":  # each process imports this file, and would start more without this line
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes (2)")
    args = parser.parse_args()
    # Passes the rank first. An exception in one of them ends the others and is raised here.
    torch.multiprocessing.spawn(work, args=(args.nproc, free_port()), nprocs=args.nproc)
