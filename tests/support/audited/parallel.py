"""Plain DDP over several processes and buckets; right, with ``--mistake`` as one would make it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="none")
mistake = parser.parse_args().mistake
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
rows = torch.Generator().manual_seed(5)
data = TensorDataset(
    torch.randn(144, 20, generator=rows), torch.randint(0, 5, (144,), generator=rows)
)
net = nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.ReLU(),
                    nn.Linear(96, 5))  # fmt: skip
model = DistributedDataParallel(net, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
torch.manual_seed(100 + rank)
step, kept = 0, None
if os.path.exists("last.pt"):
    kept = torch.load("last.pt", weights_only=False)
    net.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    step = kept["step"]
while step < 3 * len(loader):
    epoch, place = divmod(step, len(loader))
    sampler.set_epoch(epoch)
    if mistake == "no-skip":
        place = 0
    for index, (x, y) in enumerate(loader):
        if index < place:
            continue
        if index == place and kept and step == kept["step"]:
            states = kept["random"]
            torch.set_rng_state(states[0 if mistake == "rank-0-rng" else rank])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            states = [None] * world
            dist.all_gather_object(states, torch.get_rng_state())
            kept = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                    "random": states}  # fmt: skip
            if rank == 0:
                torch.save(kept, "last.new")
                os.replace("last.new", "last.pt")
            dist.barrier()
dist.destroy_process_group()
