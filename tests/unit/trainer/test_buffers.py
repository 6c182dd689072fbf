"""Buffers that are put back when an update is left out."""

from __future__ import annotations

import torch
from torch import nn

from ddpjob_trainer.state.buffers import Backup, caches


def test_a_graph_that_is_open_when_buffers_are_put_back_has_its_backward_still():
    """A GAN's update of D may be left out while G's graph waits for its loss."""
    norm = nn.BatchNorm1d(4)
    backup = Backup(norm)
    backup.take(0)
    out = norm(torch.randn(8, 4)).pow(3).sum()
    backup.put_back()
    assert not norm.running_mean.any()
    assert not norm.num_batches_tracked
    out.backward()
    assert norm.weight.grad is not None


def test_a_cache_is_what_no_persistent_buffer_is():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    model[1].register_buffer("cache", torch.ones(2), persistent=False)
    model[1].register_buffer("later", None, persistent=False)
    model[0].register_buffer("same", model[0].running_mean, persistent=False)
    assert caches(model) == {"1.cache"}
    assert caches(nn.Linear(2, 2)) == set()
