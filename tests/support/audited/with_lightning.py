"""Lightning's Trainer as its manual has it: last.ckpt within epochs, resumed from there."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


lightning.seed_everything(1)
rows = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(96, 8, generator=rows), torch.randn(96, 1, generator=rows))
saved = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=5, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=4, callbacks=[saved], logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path="last")
