"""Pin the sources of different bits, and warm DDP up so that restarts are bitwise.

start() and DdpAveraging call it. DDP's reducer groups gradients into buckets in the order of
model.parameters(), and after the first backward regroups them in the order in which gradients
became ready. A gradient's place in a bucket decides the order of additions in a ring, so a
restarted process, whose first step uses the first grouping, differs in the last bits from one that
was never stopped (at two ranks a + b == b + a hides it). So the first synced backward of every
process is run twice on one graph: once to learn the order, its gradients discarded, once for real.
User code runs once. With find_unused_parameters the reducer never regroups, and no warm-up is
needed (torchft's way); but it walks the graph in each step, 9 to 12 % of forward and backward of
12 to 148 small parameters at 3 ranks on the CPU, and a loss that misses parameters passes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpjob_trainer import failpoints
from ddpjob_trainer.data import generators
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gradients.replica_check import hash_tensors

#: The default level by type of device.
LEVELS = {"cpu": "resume", "cuda": "off"}
#: NCCL would choose these by the number and wiring of the GPUs, and the order of its sums with
#: them.
_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}


def pin_arithmetic(level: str, threads: int, device: torch.device) -> None:
    """Fix the number of threads, and forbid kernels that are not deterministic."""
    torch.set_num_threads(threads)
    if level == "off":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    # Not use_deterministic_algorithms(), which would import the whole compiler for its flag.
    torch.set_deterministic_debug_mode("error")
    # Only for speed: by default every torch.empty would be filled with NaN.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False
    if level == "resume" and device.type == "cuda":  # elastic adds up by itself
        for name, value in _NCCL.items():  # read when the ranks meet; the user's own values win
            os.environ.setdefault(name, value)


def warm_up(model: DistributedDataParallel, loss: torch.Tensor) -> None:
    """Run backward for its bucket order only; the caller then runs it for real.

    It restores all that user code can see: gradients (those of earlier micro-batches are kept),
    random numbers that gradient hooks drew, and buffers that a checkpointed forward changed again.
    """
    if _finds_unused(model):
        return  # such a reducer never regroups
    buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # With a static graph the reducer looks at the graph once before it looks at the order.
    for _ in range(2 if model.static_graph else 1):
        for parameter, _ in gradients:
            parameter.grad = None  # accumulated gradients must not be added to
        with generators.kept():
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        if not is_reduced(model):
            raise unreached(model)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # .data: the graph checks the version of its saved tensors
        # As DistributedDataParallel does between two steps, without the forward in between.
        for parameter, _ in gradients:
            parameter.grad = None  # before memory is allocated for other buckets
        reducer: Any = model.reducer
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
    failpoints.reach("warm-up")
    for parameter, gradient in gradients:
        parameter.grad = gradient


@contextlib.contextmanager
def warmed_up(model: DistributedDataParallel, loss: torch.Tensor) -> Iterator[None]:
    """Warm up; in the block the caller runs the same backward for real.

    Raises ConfigError if that gives this rank other gradients: a Function whose backward changes
    its saved tensors would make the first step of each process wrong.
    """
    with _extremes(model) as found:
        warm_up(model, loss)
        first = dict(found)
        yield
    other = _different(first, found)
    if other is not None:
        raise ConfigError(
            "step.backward(): the first backward of each process runs twice at level='resume', to"
            f" learn DDP's buckets, and the second gave {other!r} another gradient. Look for an"
            " autograd.Function, or a hook, whose backward changes in place what it has saved, or"
            " counts: let it return a new tensor, or use level='off'"
        )


@contextlib.contextmanager
def _extremes(model: DistributedDataParallel) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the minimum and maximum of each gradient of the newest backward, by name.

    They are this rank's own, before averaging: independent of communication hooks and of the order
    of additions.
    """
    found: dict[str, torch.Tensor] = {}

    def look(name: str, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # for an output that the loss leaves out
            return
        values = gradient.detach()
        values = values._values() if values.is_sparse else values
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        if values.numel():
            found[name] = torch.stack(torch.aminmax(values))

    hooks = [
        parameter.register_hook(partial(look, name))
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _different(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first gradient that differs more than nondeterministic kernels make it.

    One that adds up to zero consists of such differences, hence a share of the largest. Values that
    are not finite do not count.
    """
    sizes = {name: float(extremes.abs().max()) for name, extremes in second.items()}
    least = 1e-5 * max(sizes.values(), default=0.0)
    for name, extremes in first.items():
        bound = 1e-2 * sizes[name] + least
        if any((extremes.double() - second[name].double()).abs() > bound):
            return name
    return None


def is_reduced(model: DistributedDataParallel) -> bool:
    """Return whether all gradients of a backward have been reduced.

    DDP itself reports that only in the next forward, after an update has applied local ones.
    """
    reducer: Any = model.reducer
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def unreached(model: DistributedDataParallel) -> ConfigError:
    """Build the error for a backward that leaves the reducer waiting for gradients."""
    names = [n for n, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    which = f", not {', '.join(names[:3])}{', ...' if names[3:] else ''}" if names else ""
    return ConfigError(
        f"step.backward(): the loss reaches only some of the model's parameters{which}, and DDP"
        " waits for all. Several losses that reach different ones are added up:"
        " step.backward(first + second). If no loss of the step reaches them, use"
        " run.prepare(..., find_unused_parameters=True), or make the parts models of their own:"
        " run.prepare([first, second], [its_optimizer, other_optimizer])"
    )


def _finds_unused(model: DistributedDataParallel) -> bool:
    return bool(model.find_unused_parameters) and not model.static_graph


def check_marks(model: DistributedDataParallel) -> None:
    """Raise ConfigError for a backward that no forward announced to the reducer.

    With find_unused_parameters, DDP would treat this backward's parameters as used in the next
    step, and give them a gradient of zero there, or fail; after a resume it would not.
    """
    if _finds_unused(model):
        raise ConfigError(
            "step.backward(): with find_unused_parameters=True each batch's forward is followed by"
            f" one backward, before the next forward. {_ADD_UP}"
        )


@contextlib.contextmanager
def reducer_errors() -> Iterator[None]:
    """Raise ConfigError for errors that the reducer finds during a backward."""
    try:
        yield
    except RuntimeError as error:
        for words, cure in _REDUCER_ERRORS.items():
            if words in str(error):
                raise ConfigError(f"step.backward(): {cure}") from error
        raise


_ADD_UP = "Several losses of a batch are added up: step.backward(first + second)"
#: torch's message, and the cure.
_REDUCER_ERRORS = {
    "Expected to mark a variable ready only once": (
        "DDP met a parameter twice in one backward. With find_unused_parameters=True each forward"
        " is followed by its own step.backward(); leave the option out if the losses together reach"
        " all parameters. With checkpointing use checkpoint(..., use_reentrant=False)"
    ),
    "Your training graph has changed in this iteration": (
        "the loss reaches other parameters than in the first step, which static_graph=True"
        f" excludes: use find_unused_parameters=True in its place. {_ADD_UP}"
    ),
}


def buckets(model: DistributedDataParallel) -> list[list[str]]:
    """Return the names of parameters whose gradients are sent together, in order."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    reducer: Any = model.reducer
    return [
        [names[parameter] for parameter in bucket.parameters()]
        for bucket in reducer._get_zeros_like_grad_buckets()
    ]


def bucket_layout(model: DistributedDataParallel) -> str:
    """Hash which parameters lie in which bucket, in which order: equal layouts, equal bits."""
    return hashlib.sha256(json.dumps(buckets(model)).encode()).hexdigest()[:16]


def order_of_sums(model: DistributedDataParallel, rank: int) -> str:
    """Hash the backend's sums of known numbers, in pieces as large as the buckets.

    NCCL adds up in an order that depends on how the GPUs are wired, and on their ranks. Collective.
    """
    of = dict(model.module.named_parameters())
    found = []
    for names in buckets(model):
        first = of[names[0]]
        seeded = torch.Generator(first.device).manual_seed(rank)
        count = sum(of[name].numel() for name in names)
        numbers = torch.rand(count, generator=seeded, device=first.device).to(first.dtype)
        dist.all_reduce(numbers)
        found.append(int(hash_tensors([numbers])[0]))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
