"""Uneven inputs: the last batch of an epoch is not enough for everyone.

    ddpjob-trainer run --nproc 3 uneven.py

A rank without a batch makes no all-reduce, and the others would wait for it for ever. Three ways:

drop it        the default of ours; over many epochs no sample is lost, if they are shuffled
Join           PyTorch's context manager for plain DDP: a rank that has run out answers the others'
               collectives with zeros. Their sum is divided by the number of all ranks, or of those
               that still have a batch; either way a rank's batch of 1 weighs as much as one of 2
weight 0       ours: the dataset is filled up, and what fills it up counts for nothing, so that the
               mean is over the samples that there are, as one process would compute it

All train the same model on 29 samples, 12 per step: the third step has 5, and where each rank takes
4 in a row, as plain scripts do, rank 0 has 4 of them, rank 1 has 1, rank 2 none. What one process
makes of the 29 is the reference.
"""

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

GLOBAL_BATCH, SAMPLES, LR = 12, 29, 0.1
generator = torch.Generator().manual_seed(7)
x = torch.randn(SAMPLES, 4, generator=generator)
y = torch.randn(SAMPLES, 1, generator=generator)
logging = ddp.Logging(every=3)
run = ddp.start(total_steps=3, global_batch=GLOBAL_BATCH, seed=7, logging=logging)


def make() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(4, 1).to(run.device)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x.to(run.device)), y.to(run.device))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


alone = make()
optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
for start in range(0, SAMPLES, GLOBAL_BATCH):
    optimizer.zero_grad()
    loss(alone, x[start : start + GLOBAL_BATCH], y[start : start + GLOBAL_BATCH]).backward()
    optimizer.step()


def tell(name: str, model: nn.Module) -> None:
    if run.is_main:
        off = float((weights(model) - weights(alone)).abs().max())
        print(f"{name}: off the one process's weights by {off:.1e}", flush=True)


# --- Plain DDP, with Join ----------------------------------------------------------------------
for divide in (True, False):
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    share = GLOBAL_BATCH // run.world_size
    with Join([model], divide_by_initial_world_size=divide):
        for start in range(run.rank * share, SAMPLES + GLOBAL_BATCH, GLOBAL_BATCH):
            mine = slice(start, start + share)
            if not len(x[mine]):
                break  # Join answers from here on; other ranks go on
            optimizer.zero_grad()
            loss(model, x[mine], y[mine]).backward()
            optimizer.step()
    tell(f"Join, divided by {'all' if divide else 'present'} ranks", model)

# --- Ours: samples of weight 0 fill the last batch up ------------------------------------------
module = make()
model, optimizer = run.prepare(module, torch.optim.SGD(module.parameters(), lr=LR))
missing = -SAMPLES % GLOBAL_BATCH
real = torch.cat([torch.ones(SAMPLES), torch.zeros(missing)])
filled = TensorDataset(torch.cat([x, x[:missing]]), torch.cat([y, y[:missing]]), real)
for step in run.steps(filled, shuffle=False):
    for inputs, targets, counts in step.batches:
        each = nn.functional.mse_loss(model(inputs), targets, reduction="none").mean(1)
        step.backward((each * counts).sum() / counts.sum(), weight=counts.sum())
    step.commit()
tell("weight 0", model)
run.finish()
