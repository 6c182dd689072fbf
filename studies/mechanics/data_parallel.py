"""What nn.DataParallel does in each forward, step by step, and how to reach through the wrapper.

    python data_parallel.py

One process, several devices: scatter the batch, replicate the model, apply in threads, gather on
the first device. It does all four in every forward; DDP replicates once, in as many processes, and
sends gradients only. DP's primitives are no part of DDP. With two or more GPUs torch's own
primitives run, and nn.DataParallel beside them. Without, nn.DataParallel is a plain call of the
model, so the same four steps are done here by hand, in threads, on the CPU.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, by DDP, it would hold the process group for ever
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel, gather, parallel_apply, replicate, scatter

gpus = list(range(torch.cuda.device_count()))
real = len(gpus) >= 2
devices = gpus if real else ["cpu", "cpu", "cpu"]
Forward = Callable[[torch.Tensor], torch.Tensor]


class Blocks(nn.Module):
    """A model with something that a wrapper does not have: blocks, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = nn.Linear(10, 20), nn.Linear(20, 20)
        self.classes = 20

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block2(torch.relu(self.block1(x)))


def data_parallel_by_hand(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The four steps on the CPU: cut as on GPUs, but nothing moves."""
    chunks = batch.chunk(len(devices))  # scatter
    # replicate: copies that autograd knows, so that all of their gradients come back to the model.
    replicas = [{name: p.clone() for name, p in model.named_parameters()} for _ in chunks]
    # A module each: functional_call() puts the copies into it for the time of the call.
    modules = [copy.deepcopy(model) for _ in chunks]

    def call(module: nn.Module, replica: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, replica, (x,))

    with ThreadPoolExecutor(len(devices)) as threads:  # parallel_apply: threads share the GIL
        outputs = list(threads.map(call, modules, replicas, chunks))
    return torch.cat(outputs)  # gather


def data_parallel_by_torch(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    chunks = scatter(batch, devices)
    replicas = replicate(model, devices[: len(chunks)])
    used = devices[: len(chunks)]
    return gather(parallel_apply(replicas, chunks, devices=used), devices[0])


torch.manual_seed(7)
model = Blocks()
batch = torch.randn(12, 10)
if real:
    model, batch = model.to(devices[0]), batch.to(devices[0])


def gradients_of(forward: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the gradients that end up in the one model."""
    model.zero_grad()
    output = forward(batch)
    output.square().mean().backward()
    return output, torch.cat([p.grad.flatten() for p in model.parameters()])


whole, expected = gradients_of(model)
steps = data_parallel_by_torch if real else data_parallel_by_hand
cut, found = gradients_of(lambda x: steps(model, x))
assert torch.allclose(cut, whole, atol=1e-6)
assert torch.allclose(found, expected, atol=1e-6)
print(f"by {'torch' if real else 'hand, in threads'}: {len(batch)} samples on {devices}")
print(f"output and gradients are those of one call, within {(found - expected).abs().max():.0e}")

dp = nn.DataParallel(model)
output, found = gradients_of(dp)
assert torch.allclose(found, expected, atol=1e-6)
print(f"nn.DataParallel: {f'on {dp.device_ids}' if dp.device_ids else 'no GPUs, a plain call'}")

# --- Through the wrapper ------------------------------------------------------------------------
# A wrapper is another module: what the model has is at .module, and names in state_dict() begin
# with it. So save model.state_dict(), not the wrapper's.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for wrapper in (dp, DistributedDataParallel(Blocks())):
    name = type(wrapper).__name__
    try:
        wrapper.classes  # noqa: B018
    except AttributeError as error:
        print(f"{name}.classes: {error}")
    print(f"{name}.module.classes: {wrapper.module.classes}")
    assert wrapper.module.classes == 20
    assert next(iter(wrapper.state_dict())) == "module.block1.weight"
del wrapper  # it holds the group, and so its threads
dist.destroy_process_group()
