"""A loop with this project's library."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

torch.manual_seed(1)
data = TensorDataset(torch.randn(144, 20), torch.randint(0, 5, (144,)))
run = ddp.start(total_steps=36, global_batch=12, seed=3, snapshots=ddp.Snapshots(every=5))
net = nn.Sequential(nn.Linear(20, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2),
                    nn.Linear(96, 5))  # fmt: skip
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
model, optimizer = run.prepare(net, optimizer, scheduler=scheduler, bucket_cap_mb=0.02)
for step in run.steps(data):
    for x, y in step.batches:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.commit()
run.finish()
