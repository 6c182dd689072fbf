"""A model."""

import torch


def make(width):
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 2))
