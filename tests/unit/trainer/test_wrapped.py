"""The wrapper that prepare() returns tells the loop, and is in no copy and no file of the model."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer.gradients.ddp import Wrapped


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_prints_copies_and_saves_as_it_would_without_us():
    told: list[object] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        told.append("waits")
        yield

    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("cache", torch.ones(1), persistent=False)
    model, file = Wrapped(module), io.BytesIO()
    model.on_forward, model.waiting = told.append, waiting
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(each) is DistributedDataParallel
        each(torch.randn(4, 2))
        assert len(each.modules_buffers) == 4
    assert told == []
    model(torch.randn(4, 2))
    assert told == [model, "waits"]
    assert len(model.modules_buffers) == 4
    module.cache = torch.ones(5)
    model(torch.randn(4, 2))
    assert [tuple(b.shape) for b in model.modules_buffers][-1] == (1,), "a cache stays"
