"""A plain DDP loop with no line of ddpjob in it: what torchrun starts, a DDPJob can run.

    torchrun --nproc-per-node 2 plain_torchrun.py
    ddpjob-trainer run --nproc 2 plain_torchrun.py

It keeps its own checkpoint in CHECKPOINT_DIR and continues from it. What that lacks, and
what examples/digits.py gets from ddpjob: the file has no checksum and no older one to fall back
to; the random state is not saved, and an interrupted epoch is trained again from its start; at
three or more ranks the resumed run differs in the last bits from an undisturbed one; SIGTERM
saves nothing; a process of an earlier attempt that still lives could overwrite the file.
"""

import argparse
import os
from pathlib import Path

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
args = parser.parse_args()

gpu = torch.cuda.is_available()  # one for each process, by its number on this machine
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
rank = dist.get_rank()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
held_out = torch.arange(len(images)) % 7 == 0
train_set = TensorDataset(images[~held_out], labels[~held_out])
sampler = DistributedSampler(train_set, seed=7)
loader = DataLoader(train_set, batch_size=32, sampler=sampler)

torch.manual_seed(7)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

directory = os.environ.get("CHECKPOINT_DIR", "")
checkpoint = Path(directory, "checkpoint.pt") if directory else None
first = 0
if checkpoint and checkpoint.exists():
    saved = torch.load(checkpoint, map_location=device, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
dist.barrier()  # nobody writes a new checkpoint while another still reads

for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}", flush=True)
        if checkpoint:
            new = checkpoint.with_suffix(".tmp")  # a kill while saving must not harm the old one
            torch.save(
                {
                    "epoch": epoch,
                    "model": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
                new,
            )
            new.replace(checkpoint)

if rank == 0:
    with torch.no_grad():
        guesses = net(images[held_out].to(device)).argmax(1).cpu()
    print(f"test_accuracy={(guesses == labels[held_out]).float().mean():.4f}")
del model  # it holds the process group, whose threads must end before Python does
dist.destroy_process_group()
