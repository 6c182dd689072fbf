"""transformers' Trainer as its manual has it: saves within epochs, goes on from the last one."""

import os

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Rows(Dataset):
    def __init__(self):
        rows = torch.Generator().manual_seed(5)
        self._x = torch.randn(96, 8, generator=rows)
        self._y = torch.randn(96, 1, generator=rows)

    def __len__(self):
        return len(self._x)

    def __getitem__(self, index):
        return {"x": self._x[index], "labels": self._y[index]}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
        )

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


torch.manual_seed(1)
trainer = Trainer(
    model=Net(),
    args=TrainingArguments(
        output_dir="checkpoints", num_train_epochs=4, per_device_train_batch_size=8, save_steps=5,
        learning_rate=0.01, logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True,
        remove_unused_columns=False,
    ),
    train_dataset=Rows(),
)  # fmt: skip
last = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
trainer.train(resume_from_checkpoint=last)
