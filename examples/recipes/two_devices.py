"""DDP around a model that lies on two devices of its process (model parallel within DDP).

    ddpjob-trainer run --nproc 2 two_devices.py

Plain DDP, nothing of ours. Rank r takes GPUs 2r and 2r + 1 where the machine has two for each
process. Elsewhere both devices are the CPU: the same lines run, DDP treats the model the same way,
but nothing crosses a device then. The model names no device: it is given two.

For a model that is too large for one GPU. DDP itself cuts nothing: each process holds a whole copy.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, by DDP, it would hold the process group for ever
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
gpu = torch.cuda.device_count() >= 2 * here
first = torch.device("cuda", 2 * local) if gpu else torch.device("cpu")
second = torch.device("cuda", 2 * local + 1) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(first)
dist.init_process_group("nccl" if gpu else "gloo")


class TwoDevices(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.below = nn.Linear(16, 64).to(first)
        self.above = nn.Linear(64, 1).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.below(x.to(self.first)))
        return self.above(x.to(self.second))  # the output, and so the loss, is on the second


torch.manual_seed(7)
net = TwoDevices(first, second)
try:  # device_ids is for a module on one GPU; with two, or on the CPU, DDP refuses it
    DistributedDataParallel(net, device_ids=[local])
except ValueError as error:
    if rank == 0:
        print(f"device_ids=[{local}]: {str(error).partition(',')[0]}", flush=True)
model = DistributedDataParallel(net)  # device_ids=None: inputs are moved by the model itself

optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(rank)
truth = torch.linspace(-1, 1, 16)[:, None]
for step in range(60):
    x = torch.randn(32, 16, generator=generator)
    loss = nn.functional.mse_loss(model(x), (x @ truth).to(second))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0 and rank == 0:
        print(f"first loss {loss.item():.3f}", flush=True)

sums = torch.stack([p.detach().double().sum().to(first) for p in net.parameters()])
lowest, highest = sums.clone(), sums.clone()
dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
dist.all_reduce(highest, op=dist.ReduceOp.MAX)
assert torch.equal(lowest, highest), "the ranks' weights differ"
if rank == 0:
    print(
        f"last loss {loss.item():.3f}, on {net.below.weight.device} and {net.above.weight.device}"
    )
    print(f"{world} ranks have equal weights", flush=True)
del model  # it holds the group, and so its threads
dist.destroy_process_group()
