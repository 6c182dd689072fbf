"""A loop with accelerate that saves its state now and then and goes on from there."""

import re

import torch
import toy
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

accelerator = Accelerator(cpu=True)
# (the adapter)
model = toy.Line()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(toy.Toy(), batch_size=toy.BATCH)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

checkpoints = toy.OUT / "checkpoints"
done = [int(m[1]) for p in checkpoints.glob("*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
step = max(done, default=0)
if step:
    accelerator.load_state(str(checkpoints / f"step-{step}"))
toy.begun(step)
bar = tqdm(total=toy.STEPS, initial=step, disable=not accelerator.is_local_main_process)

while step < toy.STEPS:
    for batch in skip_first_batches(loader, step % len(loader)):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        bar.update(1)
        bar.set_postfix(loss=loss.item())
        accelerator.log({"loss": loss.item()}, step=step)
        if step % toy.EVERY == 0:
            accelerator.save_state(str(checkpoints / f"saving-{step}"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (checkpoints / f"saving-{step}").rename(checkpoints / f"step-{step}")
            accelerator.wait_for_everyone()

toy.ended(step, accelerator.unwrap_model(model))
accelerator.end_training()
