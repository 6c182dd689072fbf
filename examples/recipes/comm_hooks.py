"""Communication hooks: gradients travel as bf16 or fp16, in half the bytes, and what that costs.

    ddpjob-trainer run --nproc 3 comm_hooks.py

Plain DDP, nothing of ours: a hook takes each bucket in the place of DDP's all-reduce. With our
library it is prepare(comm_hook="bf16"), which resumes bit for bit like the rest. Each model below
gets one backward of the same data; the gradients' distance from those in fp32 is printed. bf16 has
fp32's range and 8 bits of precision; fp16 has 11 bits, fewer below 6e-5, and none below 3e-8.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, by DDP, it would hold the process group for ever
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)


given = 0
all_reduce = dist.all_reduce


def counted(tensor: torch.Tensor, **options: object) -> dist.Work:
    """What the hooks call: the library's, and the bytes that it is given are added up."""
    global given
    given += tensor.nbytes
    return all_reduce(tensor, **options)


dist.all_reduce = counted


def gradients(hook: object, scale: float) -> torch.Tensor:
    """The mean over all ranks, of a loss multiplied by scale, divided by it again."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(net)
    model.register_comm_hook(dist.group.WORLD, hook)
    torch.manual_seed(rank)
    x, y = torch.randn(32, 64).to(device), torch.randint(10, (32,)).to(device)
    (scale * nn.functional.cross_entropy(model(x), y)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]) / scale


for scale in (1.0, 1e-5):  # late in training gradients are small
    exact = gradients(allreduce_hook, scale)
    for hook in (allreduce_hook, bf16_compress_hook, fp16_compress_hook):
        given = 0
        found = gradients(hook, scale)
        error = float((found - exact).norm() / exact.norm())
        lost = float(((found == 0) & (exact != 0)).float().mean())
        if rank == 0:
            print(
                f"{hook.__name__:<18} gradients x {scale:<5g}: {given} bytes, "
                f"off by {error:.1e} of their norm, {lost:.1%} became zero",
                flush=True,
            )
dist.destroy_process_group()
