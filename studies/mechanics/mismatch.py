"""What happens when two ranks differ in order, number or size of their collective calls.

    ddpjob-trainer run --nproc 2 --max-restarts 0 mismatch.py KIND [KIND ...]
    TORCH_DISTRIBUTED_DEBUG=DETAIL ddpjob-trainer run --nproc 2 --max-restarts 0 mismatch.py order

swapped   two all_reduces of one shape in another order: no error, wrong sums. Nobody notices, also
          not TORCH_DISTRIBUTED_DEBUG=DETAIL: the calls look alike
order     an all_reduce meets a broadcast: both wait until the timeout, which does not say why.
          With DETAIL each call is compared first: both calls are shown, at once
count     one rank makes a call less and ends: the other's connection breaks, at once
late      one rank does not come, but lives: monitored_barrier() names it after a timeout
size      tensors of other sizes: gloo ends the process
library   a call of ddpjob's library below an `if` that one rank takes: both calls are shown

By gloo on all machines. NCCL has no monitored_barrier, and after its timeout a watchdog ends the
process (SIGABRT).
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

KINDS = ("swapped", "order", "count", "late", "size", "library")
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("kinds", nargs="+", metavar="KIND", choices=KINDS, help="see above")
parser.add_argument("--timeout", type=float, default=5, help="seconds that a call may take (5)")
args = parser.parse_args()
rank = int(os.environ["RANK"])
first = rank == 0


def swapped() -> None:
    a, b = torch.tensor([1.0]), torch.tensor([10.0])
    for tensor in (a, b) if first else (b, a):
        dist.all_reduce(tensor)
    print(f"swapped: rank {rank} has a = {float(a)}, b = {float(b)}; right are 2.0 and 20.0")


def order() -> None:
    tensor = torch.ones(4)
    if first:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    else:
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)


def count() -> None:
    for _ in range(3 if first else 2):
        dist.all_reduce(torch.ones(4))


def late() -> None:
    if first:  # names who is missing. Its timeout is its own: 30 minutes, whatever the group's is
        dist.monitored_barrier(timeout=limit)
    else:
        time.sleep(60)


def size() -> None:
    dist.all_reduce(torch.ones(4 if first else 8))


def library() -> None:
    import ddpjob_trainer as ddp  # makes the process group by itself

    run = ddp.start(total_steps=4, global_batch=2, device="cpu")
    layer, data = torch.nn.Linear(2, 1), torch.ones(8, 2)
    model, _ = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in run.steps(data):
        for batch in step.batches:
            step.backward(model(batch).sum())
        step.commit()
        if run.is_main:  # wrong: the others go on to the next step
            run.evaluate(data, lambda module, batch: module(batch).sum())
    run.finish()


limit = timedelta(seconds=args.timeout)
if args.kinds != ["library"]:
    # The default is 30 minutes (NCCL: 10). It bounds each call of the group, the wait for a rank
    # that is late included: make it larger than the longest pause that is meant, and no larger.
    # new_group(timeout=...) has its own.
    dist.init_process_group("gloo", timeout=limit)
try:
    for kind in args.kinds:
        globals()[kind]()
finally:  # joins gloo's threads: one that outlives Python's end may abort the process (SIGABRT)
    if dist.is_initialized():
        dist.destroy_process_group()
