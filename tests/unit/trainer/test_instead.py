"""What the library calls in place of a model's own methods is in no copy and no file of that."""

from __future__ import annotations

import copy
import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ddpjob_trainer.training.evaluation import watch_sharing
from ddpjob_trainer.training.prepare import tell_of_hooks


class Wrapped(nn.Linear):
    """As much of a DistributedDataParallel as that needs."""

    shared = 0

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.parameters_to_ignore: set[str] = set()
        self.module = nn.BatchNorm1d(2)
        self.modules_buffers = list(self.module.buffers())

    def _sync_buffers(self) -> None:
        self.shared += 1

    def register_comm_hook(self, state: object, hook: object) -> None: ...


def test_a_prepared_model_is_copied_and_saved_as_it_would_be_without_us() -> None:
    waits: list[int] = []

    def waiting() -> AbstractContextManager[None]:
        waits.append(1)
        return nullcontext()

    model, file = Wrapped(), io.BytesIO()
    watch_sharing(model, waiting)  # type: ignore[arg-type]
    tell_of_hooks(model)  # type: ignore[arg-type]
    torch.save(model, file)
    file.seek(0)
    copies: list[Any] = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for each in copies:
        each._sync_buffers()
        each.register_comm_hook({}, print)
        assert each.shared == 1
    assert not waits
    assert not model.shared
    model._sync_buffers()
    assert (model.shared, len(waits)) == (1, 1)
