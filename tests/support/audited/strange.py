"""What may confuse hooks, and is right: checkpointing, compile, LBFGS, sparse and odd tensors."""

import os

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

EPOCHS, ROWS, BATCH, EVERY = 3, 40, 4, 4
torch.manual_seed(0)


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=own), "id": index, "name": f"n{index}"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.ReLU())
        self.last = nn.Linear(16, 1)
        self.table = nn.Embedding(ROWS, 16, sparse=True)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, batch, *, meta):
        self.cache = torch.randn(3)  # not kept, and another one in each process
        x = checkpoint(self.first, batch["x"], use_reentrant=False)
        odd = [x.bfloat16(), torch.complex(x, x), x.detach().to(torch.float8_e4m3fn), meta]
        return {"out": self.last(x + self.table(batch["id"])), "odd": odd}


net, head = Net(), torch.compile(nn.Linear(1, 1), backend="aot_eager")
point = nn.Parameter(torch.ones(3))
dense = [one for name, one in net.named_parameters() if name != "table.weight"]
optimizers = [
    torch.optim.AdamW([*dense, *head.parameters()], lr=0.01),
    torch.optim.SparseAdam([net.table.weight], lr=0.01),
    torch.optim.LBFGS([point], max_iter=3),
]
step, kept = 0, None
if os.path.exists("last.pt"):
    kept = torch.load("last.pt", weights_only=False)
    net.load_state_dict(kept["net"])
    head.load_state_dict(kept["head"])
    for one, state in zip(optimizers, kept["optimizers"], strict=True):
        one.load_state_dict(state)
    point.data.copy_(kept["point"])
    step = kept["step"]

while step < EPOCHS * ROWS // BATCH:
    epoch, done = divmod(step, ROWS // BATCH)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
    loader = DataLoader(
        Rows(), BATCH, sampler=order, num_workers=2, generator=torch.Generator().manual_seed(1)
    )
    for index, batch in enumerate(loader):
        if index < done:
            continue
        if kept and step == kept["step"]:
            torch.set_rng_state(kept["random"])
        for one in optimizers:
            one.zero_grad()
        out = net(batch, meta={"names": {"a", "b"}})["out"]
        nothing = torch.func.vmap(net.last)(torch.randn(4, 16)).sum() * 0
        (head(out).pow(2).mean() + (out - 0.5).pow(2).mean() + nothing).backward()

        def closure(x=batch["x"]):
            optimizers[2].zero_grad()
            loss = ((point - x[0, :3]) ** 2).sum() + (point**4).sum()
            loss.backward()
            return loss

        for one, given in zip(optimizers, ([], [], [closure]), strict=True):
            one.step(*given)
        step += 1
        if step % EVERY == 0:
            kept = {
                "net": net.state_dict(), "head": head.state_dict(), "point": point.data.clone(),
                "optimizers": [one.state_dict() for one in optimizers],
                "random": torch.get_rng_state(), "step": step,
            }  # fmt: skip
            torch.save(kept, "last.new")
            os.replace("last.new", "last.pt")
            kept = None
