"""What each rank of a DDP training holds, sends and calls: counted, not timed.

Every rank measures itself; rank 0 gathers and writes one JSON file. studies/claims.py draws its
verdicts from it and tests/trainer/test_studies.py holds them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel as parallel
import wires
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
WIDTH, LAYERS = 256, 8
BUCKET_MB = 0.3  # a bucket per layer: one bucket alone would be no test of what happens to each
#: What nn.DataParallel is made of, and where torch keeps it.
PARTS_OF_DP = {
    "replicate": ("replicate", "data_parallel"),
    "scatter": ("scatter_gather",),
    "scatter_kwargs": ("scatter_gather", "data_parallel", "distributed"),
    "gather": ("scatter_gather", "data_parallel", "distributed"),
    "parallel_apply": ("parallel_apply", "data_parallel"),
    "data_parallel": ("data_parallel",),
}


def network() -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Other samples on each rank."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(16, WIDTH, generator=source)
    return inputs, torch.randint(0, WIDTH, (16,), generator=source)


def wrapped(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB, **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, first: int = 0
) -> None:
    for step in range(first, first + steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest(tensors: Iterator[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def gathered(mine: Any) -> list[Any]:
    """What each rank has, in the order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


# -- equal replicas ---------------------------------------------------------------------------


def replicas() -> dict[str, Any]:
    """Parameters per rank, and whether they are the same bits after some steps."""
    whole = sum(p.numel() for p in network().parameters())
    found: dict[str, Any] = {"parameters of the model": whole}
    silent = wrapped(network())
    for name, model, during in (
        ("with DDP", wrapped(network()), nullcontext()),
        ("without averaging", silent, silent.no_sync()),
        ("with DataParallel", nn.DataParallel(network()), nullcontext()),
    ):
        with during:
            train(model, adam(model))
        found[name] = {
            "parameters per rank": gathered(sum(p.numel() for p in model.parameters())),
            "digests": gathered(digest(model.parameters())),
        }
    return found


# -- bytes on the wire ------------------------------------------------------------------------


def moved(work: Callable[[], object]) -> list[list[int]]:
    """Bytes that ``work`` sends, [from][to]."""
    dist.barrier()
    before = wires.received()
    work()
    return wires.matrix(gathered(wires.since(before)))


def over_rank_0(nbytes: int) -> None:
    """What the claim pictures: everybody's gradients to rank 0, the parameters back."""
    mine = torch.zeros(nbytes // 4)
    if dist.get_rank():
        dist.send(mine, 0)
        dist.recv(mine, 0)
    else:
        for peer in range(1, dist.get_world_size()):
            other = torch.empty_like(mine)
            dist.recv(other, peer)
            mine += other
        for peer in range(1, dist.get_world_size()):
            dist.send(mine, peer)


def wire() -> dict[str, Any]:
    made: list[DistributedDataParallel] = []
    net = network()
    construction = moved(lambda: made.append(wrapped(net)))
    optimizer = adam(made[0])
    train(made[0], optimizer)  # buckets are rebuilt after the first backward
    steps = moved(lambda: train(made[0], optimizer, first=STEPS))
    nbytes = sum(p.nbytes for p in net.parameters())
    moved(lambda: over_rank_0(4))  # connections are made at the first use
    star = moved(lambda: over_rank_0(nbytes))
    # The gathering of the counts is in each of them; once more alone, to be taken off.
    nothing = moved(lambda: None)
    dp = nn.DataParallel(network())
    data_parallel = moved(lambda: train(dp, adam(dp)))
    sizes = made[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return {
        "bytes of gradients": nbytes,
        "buckets": len(sizes.split(",")),
        "construction": less(construction, nothing, 1),
        "DDP step": less(steps, nothing, STEPS),
        "DataParallel step": less(data_parallel, nothing, STEPS),
        "over rank 0": less(star, nothing, 1),
    }


def less(found: list[list[int]], nothing: list[list[int]], steps: int) -> list[list[float]]:
    return [
        [max(0, a - b) / steps for a, b in zip(row, empty, strict=True)]
        for row, empty in zip(found, nothing, strict=True)
    ]


# -- bytes held -------------------------------------------------------------------------------


def tensor_bytes(tensors: Iterator[Any]) -> int:
    """Each memory once; of a sharded tensor what is on this rank."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (
        value
        for entry in getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO: this rank's
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank. ``buckets``: what DDP holds beside the gradients themselves."""
    buffers: dict[int, int] = {}
    if isinstance(model, DistributedDataParallel):

        def look(_, bucket):  # type: ignore[no-untyped-def] # DDP reads a hook's annotations
            storage = bucket.buffer().untyped_storage()
            buffers[storage.data_ptr()] = storage.nbytes()
            return allreduce_hook(dist.group.WORLD, bucket)

        model.register_comm_hook(None, look)
    train(model, optimizer, 2)  # buckets are rebuilt after the first backward
    buffers.clear()
    train(model, optimizer, 1, first=2)
    gradients = [p.grad for p in model.parameters()]
    of_gradients = {g.untyped_storage().data_ptr() for g in gradients if not hasattr(g, "to_local")}
    return {
        "parameters": tensor_bytes(model.parameters()),
        "gradients": tensor_bytes(iter(gradients)),
        "buckets": sum(n for where, n in buffers.items() if where not in of_gradients),
        "optimizer state": tensor_bytes(state(optimizer)),
    }


def zero(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, parameters_as_bucket_view=False
    )


def held() -> dict[str, Any]:
    found = {}
    plain = network()
    found["one process"] = [held_by(plain, adam(plain))]
    for name, model, make in (
        ("DDP", wrapped(network()), adam),
        ("DDP, gradient_as_bucket_view", wrapped(network(), gradient_as_bucket_view=True), adam),
        ("DDP with ZeRO-1", wrapped(network()), zero),
        ("FSDP", sharded(network()), adam),
    ):
        found[name] = gathered(held_by(model, make(model)))
    return found


def sharded(net: nn.Module) -> nn.Module:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


# -- which calls which ---------------------------------------------------------------------------


@contextmanager
def without_dp() -> Iterator[None]:
    """Every function that nn.DataParallel is made of raises, wherever torch has bound it."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a part of nn.DataParallel was called")

    bound = [
        (sys.modules[f"torch.nn.parallel.{place}"], name)
        for name, places in PARTS_OF_DP.items()
        for place in places
    ] + [(parallel, name) for name in PARTS_OF_DP if hasattr(parallel, name)]
    before = [(module, name, getattr(module, name)) for module, name in bound]
    for module, name in bound:
        setattr(module, name, refuse)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def called(work: Callable[[], object]) -> list[str]:
    """Functions of torch.nn.parallel that ``work`` calls: "file:function"."""
    folder = str(Path(parallel.__file__).parent)
    found = set()

    def look(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            found.add(f"{Path(code.co_filename).name}:{code.co_name}")

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(found)


def calls() -> dict[str, Any]:
    def whole_training() -> None:
        model = wrapped(network())
        train(model, adam(model))

    with without_dp():
        ddp = called(whole_training)
        refused = []  # that each of them really raises
        for name in PARTS_OF_DP:
            place = sys.modules[f"torch.nn.parallel.{PARTS_OF_DP[name][-1]}"]
            try:
                getattr(place, name)(network(), [0], [0])
            except AssertionError:
                refused.append(name)
    inputs, _ = batch(0)
    return {
        "of DDP": ddp,
        "of DataParallel": called(lambda: nn.DataParallel(network())(inputs)),
        "made to raise": sorted(refused),
        "DDP is a subclass": issubclass(DistributedDataParallel, nn.DataParallel),
        "DataParallel's devices here": len(nn.DataParallel(network()).device_ids),
    }


PARTS = {"replicas": replicas, "wire": wire, "held": held, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"ranks": dist.get_world_size(), "steps": STEPS} | {
        name: part() for name, part in PARTS.items()
    }
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
