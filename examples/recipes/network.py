"""Which network and which backend: what there is, what was chosen, and that all ranks agree.

    ddpjob-trainer run --nproc 2 network.py
    GLOO_SOCKET_IFNAME=lo ddpjob-trainer run --nproc 2 network.py
    GLOO_SOCKET_IFNAME=eth0,eth1 torchrun ... network.py

Backends   nccl for GPUs (NVLink, InfiniBand, sockets); gloo for the CPU, and everywhere for small
           things; mpi only in a PyTorch that was built on a machine with MPI. Our library takes
           nccl where there are GPUs, else gloo, and gloo beside nccl for its own messages.
Interfaces GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name them. Unset, both look for one by
           themselves, which may be the wrong one where there are several. (On one machine our
           launcher sets lo for gloo.)
           Gloo takes a list and uses its interfaces in turn: the n-th of a rank talks to the n-th
           of every other, so all ranks must name the same NUMBER, or PyTorch waits until its
           timeout and does not say why. Names may differ: eth0 here, ens5 there.
           NCCL's list is a filter: prefixes, "=" for exact names, "^" for all others.
In a DDPJob they belong into the template's env.
"""

import os
import socket
import time

import torch
import torch.distributed as dist

import ddpjob_trainer as ddp

VARIABLE = "GLOO_SOCKET_IFNAME"
rank = int(os.environ.get("RANK", "0"))

if rank == 0:
    built = [name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()]
    print("backends in this PyTorch:", *built)
    print("interfaces of this machine:", *(name for _, name in socket.if_nameindex()), flush=True)

run = ddp.start(total_steps=1, global_batch=int(os.environ.get("WORLD_SIZE", "1")))
tensor = torch.ones(250_000, device=run.device)
for _ in range(2):  # the first call connects
    began = time.perf_counter()
    dist.all_reduce(tensor)
    float(tensor[0])  # a GPU's host has queued the call only
    seconds = time.perf_counter() - began
if run.is_main:
    print("chosen:", dist.get_backend(), "over", os.environ.get(VARIABLE, "what gloo finds"))
    print(f"all_reduce of 1 MB over {run.world_size} ranks: {1000 * seconds:.1f} ms", flush=True)
run.finish()
