"""Buffers that are put back when an update is left out."""

import pytest
import torch
from torch import nn

from ddpjob_trainer.state.stateful import BufferBackup, SteadyBuffers


def test_a_graph_open_when_buffers_are_put_back_still_has_its_backward():
    """A GAN's update of D may be left out while G's graph waits for its loss."""
    norm = nn.BatchNorm1d(4)
    backup = BufferBackup(norm)
    backup.take(0)
    out = norm(torch.randn(8, 4)).pow(3).sum()
    backup.put_back()
    assert not norm.running_mean.any()
    assert not norm.num_batches_tracked
    out.backward()
    assert norm.weight.grad is not None


def model() -> nn.Sequential:
    found = nn.Sequential(nn.BatchNorm1d(2), nn.Module())
    found[1].register_buffer("other", torch.ones(2), persistent=False)
    found[1].register_buffer("later", None, persistent=False)
    found[0].register_buffer("same", found[0].running_mean, persistent=False)
    return found


def test_ranks_share_a_buffer_outside_the_state_dict_while_shapes_agree():
    found = model()
    steady, first = SteadyBuffers(found), found[1].other
    assert [id(t) for t in steady.tensors()] == [id(first)]
    found[1].other = found[1].other * 2
    assert [id(t) for t in steady.tensors()] == [id(found[1].other)]
    found[1].other, found[1].later = torch.ones(3), torch.ones(2)
    assert [id(t) for t in steady.tensors()] == [id(first)], "a cache is each rank's own"
    assert SteadyBuffers(nn.Linear(2, 2)).tensors() == []


@pytest.mark.parametrize(("length", "left"), [(2, 1.0), (3, 5.0)])
def test_a_cache_that_has_grown_is_not_put_back(length, left):
    found = model()
    backup = BufferBackup(found)
    backup.take(0)
    found[1].other = torch.full((length,), 5.0)
    found[0](torch.randn(8, 2))
    backup.put_back()
    assert found[1].other.tolist() == [left] * length
    assert not found[0].num_batches_tracked


def test_a_persistent_buffer_is_put_back_whatever_is_there_now():
    found = nn.Module()
    for name, value in (("grown", torch.ones(2)), ("gone", torch.ones(2)), ("made", None)):
        found.register_buffer(name, value)
    backup = BufferBackup(found)
    backup.take(0)
    found.grown, found.gone, found.made = torch.ones(3), None, torch.ones(2)
    backup.put_back()
    assert found.grown.tolist() == found.gone.tolist() == [1.0, 1.0]
    assert found.made is None
