"""Make studies/scaling.md of scaling.json: `studies/scaling.py` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness import report

from findings import paying

PHASES = ("data", "forward", "backward", "exposed", "optimizer")

HEAD = """# How DDP scales, and when it stops paying

`studies/scaling.py` trains the same models with 1, 2 and 4 processes and writes this page with its
tables; every figure is in studies/scaling.json. {machine}

**What is measured.** A process is bound to one core: 1 and 2 processes have a core each, 4 share
the {cores} cores of this machine, two on each. So 4 processes cannot be faster than 2 here; they
show what a ring of four costs, and what oversubscription does. *Weak scaling*: each process keeps
its batch, the whole batch grows with them; perfect is the same time per step. *Strong scaling*: a
whole batch of 4 such batches is divided among them; perfect is a step shorter by their number.
Gradients go over gloo and the loopback interface, one thread per process, float32, AdamW. Each
repeat runs every number of processes once, and ratios are taken within a repeat; medians, with the
range.

![Throughput against the number of processes](../docs/pictures/scaling.svg)

## Measured

*Of one process*: samples per second, as a multiple of those of one process in the same repeat. *Of
what the cores give*: that, divided by the number of cores in use.

"""

WHERE = """
## Where the time goes

Milliseconds of a step, weak scaling. *Backward* ends when the last bucket of gradients is ready,
*exposed* is what is left of `loss.backward()` then: the wait for all-reduces that backward did not
hide, and the copy of the buckets back into the gradients. *Alone* is one process whose buckets are
handed back as they are: what the phases take without any communication. gloo's threads add numbers
on the same core that computes: what overlaps costs *backward* here, where a GPU's network card and
copy engines would take it. Medians of each phase, which need not add up to the median step.

![One backward, bucket by bucket](../docs/pictures/buckets.svg)

"""

RING = """
## The ring's model

A ring all-reduce of N bytes among W ranks is 2 (W - 1) messages of N / W bytes, one after the
other. A message takes a start-up time α and its bytes at a bandwidth β:

    T = 2 (W - 1) (α + N / (W β))

For large N this tends to 2 N / β whatever W is: that is why all-reduce scales. For small N it is 2
(W - 1) α, which grows with W: that is why gradients are put together in buckets.

![A ring all-reduce of four ranks](../docs/pictures/ring.svg)

α and β are fitted to gloo's all-reduces of {smallest} to {largest} on this machine, by least
squares of the relative error.

"""

AGAINST = """
The model holds where its two constants do. What it leaves out: gloo waits for peers that are not on
a core at the moment (processes that share cores), caches (β is another one for messages that fit
them), and the core's own time for adding.

## Model against measurement, and 8 processes simulated

The model's step is made of the phases of the process *alone* (measured at 1 process) and of
all-reduces that take T each: bucket i begins when backward has filled it and bucket i - 1 is done.
Its left end lets communication run beside backward for nothing; at its right end nothing overlaps,
as where one core must do both. Up to {cores} processes it takes α and β of 2 ranks, with a core
each; for 4 those of all fits, and a compute that is slower by the number of processes per core. **8
processes are a simulation** (marked †): 8 cores like these, the phases measured with one process,
the ring extrapolated from 2 ranks. Nothing with 8 processes was run.

*Measured against the model*: how far the median lies outside of the model's range, relative to its
nearer end; 0 is inside. With one process there is nothing to model: what is off there is the noise
of this machine. The model knows nothing of memory and cores that processes share, so it is too fast
for several; take what it says of 8 as a lower bound of the time.

"""

PAYING = """
## When DDP stops paying

Per step a process computes for C seconds and owes its peers T seconds of all-reduce, of which
backward hides up to a share h C (backward is about two thirds of C; the last bucket is ready only
at the end, so h is about {hidden:.2f}). So a step takes C + max(0, T - h C), and

    speed-up of W processes, each with its own batch  =  W C / (C + max(0, T - h C))

* T <= h C: all of it is hidden, scaling is linear. With T = 2 N / β that reads **C / N >= 2 / (h
  β)**: seconds of compute per byte of gradients against the network. Nothing else about the model
  matters.
* T - h C = (W - 1) C: W processes are as fast as one. Beyond it DDP costs money and gives nothing.
* C grows with the batch per process, N does not: a larger batch per process, gradient accumulation
  without synchronisation (`no_sync`), or fewer bytes (bf16 hooks, PowerSGD) are the ways out.
  Strong scaling divides C by W and keeps N: it always ends here.

**Computed, not measured**: {ranks} GPUs on a network of one line each, all of whose bandwidth is
usable; α is 50 µs over TCP and 10 µs over RDMA; gradients in float32, in buckets of 25 MiB. GPT-2
124M at 6 FLOP per parameter and token and 40 % of an H100's 989 TFLOPS, ResNet-50 at 2,500 images
per second and GPU: assumptions, too. *C needed*: seconds of forward and backward per step from
which on all of T is hidden.

"""

END = """
## Again

```
at=studies/scaling
.venv/bin/python studies/scaling.py --json $at.json --page $at.md && make manifests
```

It takes about {minutes} minutes on 2 cores that do nothing else. `make manifests` draws the picture
from studies/scaling.json. On GPUs: [gpus.md](../docs/guides/gpus.md) and `dev/bench/gpu.py` measure
our loop; a sweep over numbers of GPUs has not been run.
"""
MINUTES = 5


def page(found: Mapping[str, Any]) -> str:
    facts, cores = found["machine"], found["cores"]
    sizes = [point["nbytes"] for point in found["all-reduce"]]
    return "".join(
        (
            HEAD.format(machine=report.text(facts), cores=cores),
            report.markdown(
                "model | scaling | processes | ms per step | of one process |"
                " of what the cores give",
                measured(found),
            ),
            WHERE,
            report.markdown(("model", "processes", *PHASES, "step"), phases(found)),
            RING.format(smallest=size(min(sizes)), largest=size(max(sizes))),
            report.markdown(
                ("ranks", "α µs", "β MB/s", "all-reduces", "off by: median", "worst"), fits(found)
            ),
            AGAINST.format(cores=cores),
            report.markdown(
                "model | scaling | processes | model: ms per step | measured |"
                " measured against the model | exposed if overlapped, ms",
                against(found),
            ),
            PAYING.format(hidden=paying.HIDDEN * paying.BACKWARD, ranks=paying.RANKS),
            report.markdown(
                "model | batch per GPU | C ms | network | T ms | C needed, ms | of linear |"
                f" {paying.RANKS} GPUs are as fast as",
                computed(),
            ),
            END.format(minutes=MINUTES),
        )
    )


def size(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB" if nbytes >= 2**20 else f"{nbytes // 2**10} KiB"


def measured(found: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, modes in found["steps"].items():
        for mode, by_world in modes.items():
            for world, one in by_world.items():
                cores = min(int(world), found["cores"])
                share = [speed / cores for speed in one["of one process"]]
                times = [1000 * seconds for seconds in one["step"]]
                speeds = (report.spread(one["of one process"], 2), report.spread(share, 2))
                yield (name, mode, world, report.spread(times, 1), *speeds)


def phases(found: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, modes in found["steps"].items():
        own = str(int(modes["weak"]["1"]["phases"]["samples"]))
        rows = [("alone", found["alone"][name][own])]
        rows += [(world, one["phases"]) for world, one in modes["weak"].items()]
        for world, one in rows:
            yield (name, world, *(f"{1000 * one[phase]:.2f}" for phase in (*PHASES, "step")))


def fits(found: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, one in found["fits"].items():
        yield (
            name,
            f"{1e6 * one['alpha']:.0f}",
            f"{one['beta'] / 1e6:.0f}",
            one["points"],
            f"{100 * one['median error']:.0f} %",
            f"{100 * one['worst error']:.0f} %",
        )


def against(found: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, modes in found["model"].items():
        for mode, by_world in modes.items():
            for world, said in by_world.items():
                low, high = said["hidden"], said["in turn"]
                one = found["steps"][name][mode].get(world)
                middle = report.summary(one["step"])["median"] if one else None
                yield (
                    name,
                    mode,
                    world if one else f"{world} †",
                    f"{1000 * low:.1f} to {1000 * high:.1f}",
                    f"{1000 * middle:.1f}" if middle else "",
                    f"{100 * outside(middle, low, high):+.0f} %" if middle else "",
                    f"{1000 * said['exposed']:.1f}",
                )


def outside(value: float, low: float, high: float) -> float:
    """How far it lies outside of the range, relative to the range's nearer end."""
    if value < low:
        return value / low - 1
    return max(0.0, value / high - 1)


def computed() -> Iterator[tuple[object, ...]]:
    for case in paying.cases():
        yield (
            case.model.name,
            case.model.batch,
            f"{1000 * case.model.seconds:.0f}",
            case.network.name,
            f"{1000 * case.communication:.1f}",
            f"{1000 * case.compute_needed:.1f}",
            f"{100 * case.efficiency:.0f} %",
            f"{paying.RANKS * case.efficiency:.1f}",
        )
