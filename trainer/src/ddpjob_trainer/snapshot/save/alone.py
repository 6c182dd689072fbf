"""Write a whole snapshot from one process, beside the others' end.

training/rescue.py calls it in a survivor of a failure. It reads the live tensors, which no
update changes meanwhile, and leaves an ordinary snapshot of one data file. What is left without a
manifest counts for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from ddpjob_trainer.gpu.accelerator import Accelerator
from ddpjob_trainer.snapshot.ondisk import disk, manifest
from ddpjob_trainer.snapshot.ondisk.files import SnapshotFiles, data_name, write_summed
from ddpjob_trainer.snapshot.save.layout import Captured, Draft, fingerprint, lay_out
from ddpjob_trainer.snapshot.save.parts import Report


def write_alone(
    files: SnapshotFiles,
    rank: int,
    step: int,
    captured: Captured,
    config: Mapping[str, Any],
    accelerator: Accelerator,
    agreed: Callable[[], bool],
) -> bool:
    """Write a durable snapshot; return whether it counts.

    ``agreed``: asked once the data file is durable; without its word no manifest is written.
    Raises OSError, ValueError.
    """
    structure, flat = captured.structure, captured.flat
    layout = lay_out(structure, 1, 0)
    # Another name than that of this rank's part of a snapshot of this step, if one was begun.
    nonce = f"{files.nonce}r{rank}"
    path = files.directory / data_name(step, nonce, 0)
    now, later = layout.copies(captured)
    tensors = (tensor for _, tensor in sorted((*now, *later), key=itemgetter(0)))
    crc = write_summed(path, chain([layout.header], (_bytes(one, accelerator) for one in tensors)))
    target = files.directory / manifest.file_name(step)
    named = False
    try:
        if not agreed():
            return False
        if not disk.exists(target):  # else the gang's own came first
            report = Report(0, layout.bytes, crc, fingerprint=fingerprint(structure))
            draft = Draft(step, dict(config), structure, nonce, flat.tree, dict(flat.aliases))
            content = draft.manifest([report]).encode()
            named = True  # perhaps also where commit() fails: it may have got past its rename
            disk.commit(target, content)
        return True
    finally:
        if not named:
            with contextlib.suppress(OSError):
                disk.remove(path)


def _bytes(tensor: torch.Tensor, accelerator: Accelerator) -> memoryview:
    # A device would copy on a side stream here: that is not built.
    with accelerator.saving(accelerator.mark()):
        host = tensor.detach().to("cpu")
    return memoryview(host.view(torch.uint8).numpy().data)
