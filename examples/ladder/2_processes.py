"""Step 2: several processes train it together, on one machine or on many.

All of it is PyTorch: DistributedDataParallel (DDP), a process group, a sampler.

    torchrun --nproc-per-node 3 2_processes.py
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, by DDP, it would hold the process group for ever
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=15, help="passes over the training set (15)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
args = parser.parse_args()

# 1,797 real images, 8x8 pixels of 0..16; every seventh is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 7 == 0
train_set = TensorDataset(images[~held_out], labels[~held_out])
test_set = TensorDataset(images[held_out], labels[held_out])

# A GPU for each process, by its number on this machine; without GPUs the CPU for all.
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
# The launcher has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; this waits for all the others.
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
assert args.global_batch % world_size == 0, "--global-batch: a multiple of the processes"

torch.manual_seed(7)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10),
).to(device)  # fmt: skip
model = DistributedDataParallel(model)  # all get rank 0's weights; backward averages gradients
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# Each rank reads its own part of every global batch.
sampler = DistributedSampler(train_set, seed=7)
loader = DataLoader(train_set, args.global_batch // world_size, sampler=sampler, drop_last=True)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)  # else every epoch has the same order
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach() / world_size  # each rank knows the loss of only its samples
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs} loss {mean.item():.4f}", flush=True)

weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
digests = [""] * world_size
dist.all_gather_object(digests, hashlib.sha256(weights).hexdigest())
if len(set(digests)) != 1:
    raise RuntimeError(f"the ranks' weights differ: {digests}")
if rank == 0:
    with torch.no_grad():
        x, y = (part.to(device) for part in test_set.tensors)
        print(f"test_accuracy={(model.module(x).argmax(1) == y).float().mean().item():.4f}")
    print(f"weights_sha256={digests[0]}")
del model  # it holds the process group, whose threads must end before Python does
dist.destroy_process_group()
