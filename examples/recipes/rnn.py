"""An RNN of many small layers: one all-reduce per bucket, not one per parameter.

    ddpjob-trainer run --nproc 2 rnn.py

A character-level LSTM learns to continue a text of PyTorch's. Eight layers have 32 small
parameters besides embedding and head; each alone would be an all-reduce that costs a round trip
and moves next to nothing. Buckets put them together: the script counts both. Each process has an
interpreter, so many small kernels do not queue for one GIL, as they do in DataParallel.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=60, help="steps (60)")
parser.add_argument("--layers", type=int, default=8, help="of the LSTM (8)")
args = parser.parse_args()
LENGTH = 24
text = " ".join(str(nn.Transformer.__doc__).split())  # a text that is on every machine
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])


class Characters(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(letters), width)
        # A module per layer, with a shortcut: eight LSTM layers alone hardly learn.
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(args.layers)
        )
        self.head = nn.Linear(width, len(letters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


logging = ddp.Logging(every=20)
run = ddp.start(total_steps=args.total_steps, global_batch=32, seed=7, logging=logging)
windows = ids.unfold(0, LENGTH + 1, 3).contiguous()

# --- How many all-reduces: plain DDP, two backwards, of which the second is as all later ones --
for title, cap in (("default buckets", None), ("one per parameter", 1e-6)):
    net = Characters().to(run.device)
    probe = DistributedDataParallel(net, bucket_cap_mb=cap)
    calls = 0

    def count(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        global calls
        calls += 1
        mean = bucket.buffer() / run.world_size
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])

    probe.register_comm_hook(None, count)
    for _ in range(2):
        calls = 0
        loss_of(probe, windows[:4].to(run.device)).backward()
    if run.is_main:
        print(f"{len(list(net.parameters()))} parameters, {title}: {calls} all-reduces", flush=True)
del probe  # it holds the process group, whose threads would outlive run.finish()

# --- Training: ours ----------------------------------------------------------------------------
torch.manual_seed(7)
model = Characters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = run.prepare(model, optimizer, clip_grad_norm=1.0)
for step in run.steps(windows):
    for batch in step.batches:
        step.backward(loss_of(model, batch))
    step.commit()
    # Here, not after the loop: a restart after the last step finds no `step` there.
    if run.is_main and step.index + 1 == args.total_steps:
        print(f"last_loss={step.loss:.3f} knowing_nothing={torch.tensor(len(letters)).log():.3f}")
run.finish()
