"""A GAN on scikit-learn's handwritten digits: two models, two optimizers, updated by turns.

Killed and started again it continues with the same bits, as examples/digits.py does.

    python gan.py
    ddpjob-trainer run --nproc 3 gan.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import ddpjob_trainer as ddp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--total-steps", type=int, default=360, help="steps (360)")
parser.add_argument("--global-batch", type=int, default=96, help="samples per step (96)")
args = parser.parse_args()

NOISE = 16
digits = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1  # -1..1

run = ddp.start(total_steps=args.total_steps, global_batch=args.global_batch, seed=7)

G = nn.Sequential(
    nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()
)
D = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(128, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
(G, D), (opt_g, opt_d) = run.prepare([G, D], [opt_g, opt_d], bucket_cap_mb=0.02)


def judged(logits: torch.Tensor, real: bool) -> torch.Tensor:
    wanted = torch.full_like(logits, float(real))
    return nn.functional.binary_cross_entropy_with_logits(logits, wanted)


for step in run.steps(TensorDataset(digits)):
    for (x,) in step.batches:
        fake = G(torch.randn(len(x), NOISE, device=x.device))
        step.backward(judged(D(x), real=True) + judged(D(fake.detach()), real=False))
        step.update(opt_d)
        step.backward(judged(D(fake), real=True))
        step.update(opt_g)  # and what this loss has left in D is dropped
    step.commit()

if run.is_main:
    print(f"weights_sha256={run.weights_sha256()}")
run.finish()
