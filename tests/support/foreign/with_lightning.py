"""Lightning's Trainer with DDP, resumed from its last checkpoint."""

import lightning
import torch
import toy
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = toy.Line()

    def on_train_start(self):
        toy.begun(self.trainer.global_step)

    def training_step(self, batch, index):
        loss = self.line(**batch)["loss"]
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


callbacks = [
    ModelCheckpoint(
        dirpath=toy.OUT / "checkpoints", every_n_train_steps=toy.EVERY, save_last=True, save_top_k=0
    ),
    TQDMProgressBar(),  # rich's, the default where rich is installed, shows its end alone in a pipe
]
# (the adapter)
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=3, max_steps=toy.STEPS, callbacks=callbacks,
    log_every_n_steps=1, logger=False, enable_model_summary=False,
)  # fmt: skip
module = Module()
trainer.fit(module, DataLoader(toy.Toy(), batch_size=toy.BATCH), ckpt_path="last")
toy.ended(trainer.global_step, module.line)
