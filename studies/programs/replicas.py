"""One training step as nn.DataParallel takes it, by hand, over threads instead of GPUs.

Without GPUs nn.DataParallel only calls its module. So its steps are written out here, each with
its seconds and its bytes: scatter the batch, replicate the module, forward in one thread per
replica, gather the outputs, loss on the first, backward (on GPUs autograd has one thread per
device), add the gradients up on the first replica. The replicas are thrown away; the optimizer
knows the first one's parameters only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ByHand:
    """``count`` replicas of ``module``; each of them computes with one intra-op thread."""

    def __init__(self, module: nn.Module, count: int) -> None:
        self.module, self.count = module, count
        self.seconds: Counter[str] = Counter()  # by step of DataParallel
        self.made = 0  # replicas, all in all
        self.received = [Counter() for _ in range(count)]  # bytes from other replicas, by what
        self.held: list[dict[str, int]] = []  # bytes per replica when backward has ended

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, loss_of: Loss) -> torch.Tensor:
        """Forward and backward of a whole batch; the module's parameters have their gradients."""
        parameters = list(self.module.parameters())
        with self._timed("scatter"):
            parts = [part.clone() for part in inputs.chunk(self.count)]
            for replica, part in enumerate(parts[1:], 1):
                self.received[replica]["inputs"] += part.nbytes
        with self._timed("replicate"):
            made = [self._replica(parameters, place) for place in range(self.count)]
        with self._timed("forward"):
            outputs = together(
                [lambda net=net, part=part: net(part) for (net, _), part in zip(made, parts)]  # noqa: B905
            )
        with self._timed("gather and loss"):
            gathered = torch.cat([output.detach() for output in outputs]).requires_grad_()
            loss = loss_of(gathered, targets)
            loss.backward()
            slices = gathered.grad.split([len(output) for output in outputs])
            for replica, output in enumerate(outputs[1:], 1):
                self.received[0]["outputs"] += output.nbytes
                self.received[replica]["outputs' gradients"] += output.nbytes
        with self._timed("backward"):
            gradients = together(
                [
                    lambda out=out, leaves=leaves, grad=grad: torch.autograd.grad(out, leaves, grad)
                    for out, (_, leaves), grad in zip(outputs, made, slices, strict=True)
                ]
            )
        if not self.held:
            whole = inputs.nbytes + 2 * gathered.nbytes
            for replica in range(self.count):
                self.held.append(
                    {
                        "parameters": sum(leaf.nbytes for leaf in made[replica][1]),
                        "gradients": sum(gradient.nbytes for gradient in gradients[replica]),
                        "inputs": parts[replica].nbytes,
                        "whole batch and all outputs": 0 if replica else whole,
                    }
                )
        with self._timed("reduce"):
            for place, parameter in enumerate(parameters):
                parameter.grad = gradients[0][place]
                for others in gradients[1:]:
                    parameter.grad += others[place]
                    self.received[0]["gradients"] += others[place].nbytes
        with self._timed("destroy"):
            del made, outputs, gradients
        return loss.detach()

    def _replica(
        self, parameters: list[nn.Parameter], place: int
    ) -> tuple[nn.Module, list[torch.Tensor]]:
        """The module's structure again, around copies; the first replica shares the memory."""
        copies = [p.detach() if place == 0 else p.detach().clone() for p in parameters]
        leaves = [copy.requires_grad_() for copy in copies]
        if place:
            self.received[place]["parameters"] += sum(copy.nbytes for copy in copies)
        copy_of = dict(zip(parameters, leaves, strict=True))
        # torch's own replicate() begins with this method of each module, too.
        new = {old: old._replicate_for_data_parallel() for old in self.module.modules()}
        for old, twin in new.items():
            for name, child in old._modules.items():
                setattr(twin, name, new[child])
            for name, parameter in old._parameters.items():
                if parameter is not None:
                    setattr(twin, name, copy_of[parameter])
        self.made += 1
        return new[self.module], leaves

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begun


def together(calls: list[Callable[[], object]]) -> list:
    """One thread per call, as nn.parallel.parallel_apply starts them for each forward."""
    results: list[object] = [None] * len(calls)

    def run(place: int) -> None:
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(result is None for result in results):
        raise RuntimeError("a replica's thread failed; its traceback is above")
    return results
