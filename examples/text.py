"""Train a small language model on dict batches, as tokenizers make them and Transformers take them.

With gradient accumulation, a moving average of the weights, and fp16 with its loss scaler.

    ddpjob-trainer run --nproc 3 text.py
    ddpjob chaos --nproc 3 --kills 10 text.py --total-steps 60
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=300, help="steps (300)")
parser.add_argument("--global-batch", type=int, default=24, help="sequences per step (24)")
parser.add_argument("--micro-batches", type=int, default=2, help="accumulated on each process (2)")
parser.add_argument("--seed", type=int, default=7, help="of weights, data order, dropout (7)")
args = parser.parse_args()

LENGTH = 16
text = " ".join((nn.Transformer.__doc__ or "").split())  # a text that is on every machine
letters = sorted(set(text))
PAD = len(letters)


def sample(start: int) -> dict[str, torch.Tensor]:
    """What a tokenizer gives: ids, where they are real, and which are to be guessed."""
    ids = torch.tensor([letters.index(letter) for letter in text[start : start + LENGTH]])
    real = torch.ones(LENGTH, dtype=torch.long)
    short = int(LENGTH * (0.5 + 0.5 * (start % 7) / 6))  # padded as sentences would be
    ids[short:], real[short:] = PAD, 0
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class LanguageModel(nn.Module):
    """Takes and returns what a model of Transformers does."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(PAD + 1, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, PAD + 1)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> Output:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        ahead = places[:, None] < places[None, :]
        x = self.tokens(input_ids) + self.places(places)
        x = self.layers(x, mask=ahead, src_key_padding_mask=attention_mask == 0)
        logits = self.head(x)
        guessed, right = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return Output(nn.functional.cross_entropy(guessed.float(), right), logits)


run = ddp.start(
    total_steps=args.total_steps,
    global_batch=args.global_batch,
    micro_batches=args.micro_batches,
    precision="fp16",
    seed=args.seed,
)

model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.total_steps)
model, optimizer = run.prepare(
    model, optimizer, scheduler=scheduler, ema=0.99, clip_grad_norm=1.0, bucket_cap_mb=0.1
)

for step in run.steps([sample(start) for start in range(len(text) - LENGTH)]):
    for batch in step.batches:
        step.backward(model(**batch).loss)
    step.commit()

if run.is_main:
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
