"""What DDP adds to a model, in miniature: buckets, a hook per parameter, all-reduce in backward.

    ddpjob-trainer run --nproc 3 reducer.py
    torchrun --nproc-per-node 3 reducer.py

Plain torch.distributed and DDP, nothing of ours. The Reducer below makes its map of buckets from
the parameters' sizes and their reverse order, since backward reaches the last layer first. DDP
does so too, but only from the second step on: its first backward goes into one bucket for
everything, is watched, and then buckets are rebuilt in the order in which gradients became ready.
At the end the same with the map the wrong way round: nothing travels beside backward then.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded later, by DDP, it would hold the process group for ever
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each process here
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
CAP = 20_000  # bytes; DDP's default is 25 MiB after a first bucket of 1 MiB
Map = list[list[str]]


class Reducer:
    """Averages a module's gradients over all ranks while backward still runs."""

    def __init__(self, module: nn.Module, cap: int, *, backwards: bool = True) -> None:
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.buckets: list[list[nn.Parameter]] = [[]]
        order = list(module.parameters())
        for parameter in reversed(order) if backwards else order:
            self.buckets[-1].append(parameter)
            if sum(p.nbytes for p in self.buckets[-1]) >= cap:  # closed once it is full
                self.buckets.append([])
        self.buckets = [bucket for bucket in self.buckets if bucket]
        self.bucket_of = {p: n for n, bucket in enumerate(self.buckets) for p in bucket}
        for parameter in self.bucket_of:  # called when backward has finished this .grad
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.begin()

    def begin(self) -> None:
        self.waiting_for = [len(bucket) for bucket in self.buckets]
        self.under_way: list[tuple[dist.Work, torch.Tensor]] = []
        self.events: list[str] = []  # what happened, in order

    def ready(self, parameter: torch.Tensor) -> None:
        self.events.append(self.names[parameter])
        self.waiting_for[self.bucket_of[parameter]] -= 1
        # In the buckets' order, never as they get full: ranks may differ in that, and collectives
        # must be called in the same order everywhere. So a wrong order only costs overlap.
        while len(self.under_way) < len(self.buckets) and not self.waiting_for[len(self.under_way)]:
            bucket = self.buckets[len(self.under_way)]
            flat = torch.cat([p.grad.flatten() / world for p in bucket])
            self.events.append(f"[bucket {len(self.under_way)} leaves]")
            self.under_way.append((dist.all_reduce(flat, async_op=True), flat))

    def finish(self) -> list[str]:
        """After backward: wait for every bucket and put the means into .grad; tell what was."""
        events = [*self.events, "[backward has ended]"]
        for bucket, (work, flat) in zip(self.buckets, self.under_way, strict=True):
            work.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p)
        self.begin()
        return events

    def map(self) -> Map:
        return [[self.names[p] for p in bucket] for bucket in self.buckets]


def watched(module: nn.Module) -> tuple[DistributedDataParallel, Map]:
    """Return DDP over a module, and a list to which each bucket adds itself when it is sent."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP / 2**20)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: Map = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([names[id(p)] for p in bucket.parameters()])
        flat = bucket.buffer().div_(world)
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    return ddp, seen


def make() -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(96, 8)).to(device)


def shown(map_: Map) -> str:
    return " | ".join(" ".join(bucket) for bucket in map_)


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * rank + step)  # every rank has its own data
    x, y = torch.randn(16, 32).to(device), torch.randn(16, 8).to(device)
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


def say(*words: object) -> None:
    if rank == 0:
        print(*words, flush=True)


mine, theirs = make(), make()
reducer = Reducer(mine, CAP)
ddp, seen = watched(theirs)
maps = []
for step in range(3):
    backward(mine, step)
    events = reducer.finish()
    backward(ddp, step)
    maps.append(list(seen))
    seen.clear()
    difference = float((gradients(mine) - gradients(theirs)).abs().max())
    assert difference < 1e-6  # 0 where the maps are equal: then the sums are made alike
    say(f"step {step}: gradients differ from DDP's by at most {difference:.0e}")

say("this Reducer's map     :", shown(reducer.map()))
say("DDP, its first backward:", shown(maps[0]))
say("DDP, after the rebuild :", shown(maps[1]))
assert reducer.map() == maps[1] == maps[2], "DDP rebuilds once, and then as above"
say("DDP's own log: rebuilt :", ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"], "bytes")
say("one backward           :", *events)

other = make()
wrong = Reducer(other, CAP, backwards=False)
backward(other, 2)
say("the wrong way round    :", *wrong.finish())
assert torch.allclose(gradients(other), gradients(mine), atol=1e-6)  # right, but nothing overlaps
del ddp  # it holds the group, and so its threads
dist.destroy_process_group()
