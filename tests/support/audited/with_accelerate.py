"""A loop with accelerate that saves its state within epochs, and goes on from there."""

import re
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, EVERY = 4, 5
set_seed(1)
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
rows = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(96, 8, generator=rows), torch.randn(96, 1, generator=rows))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

checkpoints = Path("checkpoints")
done = [int(m[1]) for p in checkpoints.glob("*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
step = max(done, default=0)
if step:
    accelerator.load_state(str(checkpoints / f"step-{step}"))

for epoch in range(step // len(loader), EPOCHS):
    loader.set_epoch(epoch)
    begun = step - epoch * len(loader)
    for x, y in skip_first_batches(loader, begun) if begun else loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            accelerator.save_state(str(checkpoints / f"saving-{step}"))
            (checkpoints / f"saving-{step}").rename(checkpoints / f"step-{step}")
