"""Two optimizers, accumulated gradients, bfloat16, tied weights, evaluation: right, and odd."""

import os

import torch
from torch import nn

EPOCHS, PER_EPOCH, EVERY, PARTS = 3, 6, 4, 2
torch.manual_seed(1)
rows = torch.randn(PER_EPOCH * 8, 4, generator=torch.Generator().manual_seed(5))


class Tied(nn.Module):
    """Its last layer has the first one's weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, z):
        return self.last(torch.relu(self.first(z)))


maker, judge = Tied(), nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(),
                                     nn.Linear(16, 1))  # fmt: skip
optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (judge, maker)]
scaler = torch.amp.GradScaler("cpu", enabled=False)
parts = {"maker": maker, "judge": judge, "first": optimizers[0], "second": optimizers[1]}
loss_of = nn.BCEWithLogitsLoss()
step = 0
if os.path.exists("last.pt"):
    kept = torch.load("last.pt", weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(kept[name])
    step = kept["step"]
    torch.set_rng_state(kept["random"])


def evaluate():
    judge.eval()
    scores = judge(rows).mean().item()  # no no_grad(): as many do
    judge.train()
    return scores


while step < EPOCHS * PER_EPOCH:
    epoch, place = divmod(step, PER_EPOCH)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
    real = rows[order[place * 8 : place * 8 + 8]]
    for index, optimizer in enumerate(optimizers):
        optimizer.zero_grad(set_to_none=True)
        for part in real.chunk(PARTS):
            with torch.autocast("cpu", torch.bfloat16):
                made = maker(torch.randn(len(part), 4))
                if index == 0:
                    scores = judge(torch.cat([part, made.detach()]))
                    wanted = torch.cat([torch.ones(len(part), 1), torch.zeros(len(part), 1)])
                else:
                    scores = judge(made)
                    wanted = torch.ones(len(part), 1)
                loss = loss_of(scores.float(), wanted) / PARTS
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    step += 1
    if step % EVERY == 0:
        evaluate()
        kept = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**kept, "step": step, "random": torch.get_rng_state()}, "last.new")
        os.replace("last.new", "last.pt")
        evaluate()
