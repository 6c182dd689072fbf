"""What is said of DataParallel and DDP, each with its verdict out of what was measured.

A verdict is computed: a fact from counts, a speed against the thresholds below. The words around it
say why, and hold for any figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from findings.counted import (
    even,
    held,
    partitioned,
    parts_of_dp_called,
    replicas_equal,
    ring_share,
    traffic,
)

NEARLY = 0.9  # of linear, or of a step: "near-linear", "efficient"
FASTER = 1.1  # times: less is within the noise of such a machine

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """``row``: of the list of what the literature teaches. ``verdict``: see word() and shown()."""

    row: int
    said: str
    verdict: str
    figure: str
    why: str


def word(holds: Sequence[bool]) -> str:
    """Of a claim that was tried several times."""
    return "true" if all(holds) else "when" if any(holds) else "false"


def shown(holds: Sequence[bool]) -> str:
    """Of a claim about speeds: one machine that does not bear it out has not refuted it."""
    found = word(holds)
    return "not shown" if found == "false" else found


def listed(values: Mapping[str, float], form: str = "{:.2f}") -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())


def kilobytes(nbytes: float) -> str:
    return f"{nbytes / 1000:,.0f} kB"


# -- the claims ---------------------------------------------------------------------------------


def claims(found: Found, scaling: Found) -> list[Claim]:
    """In the order of the rows. ``scaling``: the result of studies/scaling.py."""
    return [
        *_three_differences(found),
        _small_layers(found),
        *_promises(found, scaling),
        _too_large(found),
        _partitions(found),
        _slower(found),
        _first_node(found),
        _building_block(found),
        _more_memory(found),
        _recurrent(found),
    ]


def _three_differences(found: Found) -> list[Claim]:
    facts, ways = found["facts"], found["ways"]
    overhead = {
        name: sum(one["dp's phases"][part] for part in ("replicate", "destroy"))
        / sum(one["dp's phases"].values())
        for name, one in ways.items()
    }
    made = {one["replicas made per step"] for one in ways.values()}
    construction = sum(map(sum, facts["wire"]["construction"]))
    step = median([sent for sent, _ in traffic(facts, "DDP step")])
    alone = sum(sent for sent, _ in traffic(facts, "DataParallel step"))
    gil = {name: one["speed-up of compute"] for name, one in ways.items()}
    threads = {name: median(one["dp"]) for name, one in gil.items()}
    processes = {name: median(one["ddp"]) for name, one in gil.items()}
    return [
        Claim(
            4,
            "DataParallel replicates the module in every forward and throws the replicas away; DDP"
            " replicates once.",
            word([min(made) >= found["replicas"], step < 1.1 * ring_share(facts)]),
            f"DP made {max(made):.0f} replicas per step, which took"
            f" {listed({k: 100 * v for k, v in overhead.items()}, '{:.1f} %')} of its steps. DDP"
            " sent"
            f" {kilobytes(construction)} when it was constructed (the parameters, from rank 0), and"
            f" then {kilobytes(step)} per rank and step: the gradients alone.",
            "DDP's replicas stay equal by themselves: equal parameters, equal averaged gradients,"
            " equal optimizers. Parameters never travel again. DataParallel has one optimizer, on"
            " the"
            " first device, so the others' copies are out of date after every step.",
        ),
        Claim(
            4,
            "DataParallel is for one machine, DDP for several.",
            word([replicas_equal(facts), not replicas_equal(facts, "with DataParallel")]),
            f"{facts['ranks']} processes, each with other data: under DDP they sent"
            f" {kilobytes(step)} per"
            " rank and step through TCP sockets, as they would between machines, and had"
            f" {len(set(facts['replicas']['with DDP']['digests']))} set of weights in the end;"
            " under"
            f" nn.DataParallel they sent {kilobytes(alone)} and had"
            f" {len(set(facts['replicas']['with DataParallel']['digests']))}.",
            "A thread cannot run in another machine's process. DDP's ranks share nothing but a"
            " process group, so a second machine is another address; this project's own tests run"
            " it between pods on different nodes.",
        ),
        Claim(
            4,
            "DataParallel's threads contend for Python's lock (the GIL); DDP's processes each have"
            " their own.",
            shown([min(pairs) > 1 for pairs in _pairs(found).values()]),
            f"Forward and backward of {found['replicas']} replicas at once, nothing replicated or"
            f" reduced, are faster than one after the other by: threads {listed(threads)};"
            " processes"
            f" {listed(processes)} ({found['replicas']} would be perfect; what is above it is the"
            " noise of this machine). True only if processes win in every repeat with every model.",
            "Only one thread of a process runs Python at a time: that is a fact of CPython with its"
            " lock. How much it costs depends on how much of a step is Python: kernels let go of"
            " the lock while they compute.",
        ),
    ]


def _pairs(found: Found) -> dict[str, list[float]]:
    """How much more processes gain than threads, per model and repeat."""
    gained = {name: one["speed-up of compute"] for name, one in found["ways"].items()}
    return {
        name: [b / a for a, b in zip(one["dp"], one["ddp"], strict=True)]
        for name, one in gained.items()
    }


def _small_layers(found: Found) -> Claim:
    gap = {name: median(pairs) for name, pairs in _pairs(found).items()}
    others = [value for name, value in gap.items() if name != "rnn"]
    return Claim(
        11,
        "Without GIL contention DDP matters most for RNNs and models of many small layers.",
        shown([gap["rnn"] > FASTER * value for value in others]),
        f"Speed-up of processes over that of threads: {listed(gap)}. The rnn calls 96 GRU cells of"
        " 32"
        " units per forward.",
        "The reason given for it: the smaller a kernel, the larger the share of Python between two"
        " of them, which threads must take in turns. On two cores, with two threads, it does not"
        " show if the figure does not.",
    )


def _promises(found: Found, scaling: Found) -> list[Claim]:
    facts, weights = found["facts"], found["weights"]
    cores = str(min(2, scaling["cores"]))

    def speed(mode: str) -> dict[str, float]:
        return {
            name: median(modes[mode][cores]["of one process"])
            for name, modes in scaling["steps"].items()
        }

    strong = speed("strong")
    same_batch = {
        name: median([b / a for a, b in zip(one["one"], one["ddp"], strict=True)])
        for name, one in ((n, w["steps per second"]) for n, w in found["ways"].items())
    }
    weak = {name: value / int(cores) for name, value in speed("weak").items()}
    phases = {name: modes["weak"][cores]["phases"] for name, modes in scaling["steps"].items()}
    compute = {
        name: 1
        - one["exposed"]
        / sum(one[p] for p in ("data", "forward", "backward", "exposed", "optimizer"))
        for name, one in phases.items()
    }
    same = {level: len(set(digests.values())) == 1 for level, digests in weights.items()}
    worlds = ", ".join(weights["elastic"])
    return [
        Claim(
            30,
            "DDP accelerates training.",
            shown([value > FASTER for value in (*strong.values(), *same_batch.values())]),
            f"The same whole batch on {cores} cores instead of 1, as many times as fast: with a"
            f" batch of four shares {listed(strong)}, with one of two (table below)"
            f" {listed(same_batch)}.",
            "It does where a step computes for longer than its gradients travel:"
            " [scaling](scaling.md)"
            " has the ratio and a table of networks.",
        ),
        Claim(
            30,
            "DDP uses the hardware efficiently.",
            shown([value > NEARLY for value in weak.values()]),
            f"Share of what {cores} cores give, every process with its own batch: {listed(weak)}"
            f" (efficient: above {NEARLY}). Of a step"
            f" {listed({k: 100 * v for k, v in compute.items()}, '{:.0f} %')} are not exposed"
            " communication.",
            "Backward hides the all-reduce of all buckets but the last, if it is long enough. On a"
            " CPU"
            " the hidden part is not free: gloo adds on the core that computes.",
        ),
        Claim(
            30,
            "Scaling is near-linear.",
            shown([value > NEARLY for value in weak.values()]),
            f"{cores} processes with a core each, every one with its own batch, against {cores}"
            " times"
            f" one: {listed(weak)} (near-linear: above {NEARLY}).",
            "Near-linear is a property of a model, a batch and a network together, not of DDP: the"
            " same code is linear for a long backward and useless for a short one"
            " ([when DDP stops paying](scaling.md#when-ddp-stops-paying)).",
        ),
        Claim(
            30,
            "Replicas stay consistent.",
            word([replicas_equal(facts)]),
            f"After {facts_steps(facts)} steps on different data {facts['ranks']} ranks had"
            f" {len(set(facts['replicas']['with DDP']['digests']))} set of parameters, to the bit;"
            f" without averaging {len(set(facts['replicas']['without averaging']['digests']))}.",
            "Every rank receives the same bits from the all-reduce and runs the same optimizer on"
            " them."
            " Buffers, random numbers and non-deterministic code of yours are not covered by that"
            " ([determinism](../docs/guides/determinism.md)).",
        ),
        Claim(
            30,
            "Machines are added seamlessly.",
            word(list(same.values())) if same["elastic"] else "false",
            f"The same training with {worlds} processes, the whole batch kept, ends in"
            f" {len(set(weights['elastic'].values()))} set of weights at level elastic and in"
            f" {len(set(weights['resume'].values()))} at level resume.",
            "A process group has the size that it was made with: DDP itself must be started again."
            " And a"
            " sum over other numbers of ranks is added up in another order, so the bits change."
            " They"
            " stay only where the order is fixed whatever the number: this project's level"
            " elastic.",
        ),
    ]


def facts_steps(facts: Found) -> int:
    return int(facts["steps"])


def _too_large(found: Found) -> Claim:
    facts = found["facts"]
    kinds = ("parameters", "gradients", "buckets", "optimizer state")
    peaks = {
        how: sum(max(held(facts, how, what)) for what in kinds)
        for how in ("one process", "DDP", "DDP with ZeRO-1", "FSDP")
    }
    return Claim(
        31,
        "DDP lets models fit that are too large for one GPU.",
        word([min(held(facts, "DDP", "parameters")) < 1]),
        f"Held per rank, {facts['ranks']} ranks, AdamW, in multiples of the parameters:"
        f" {listed(peaks)}. DDP needs more than one process alone: its buckets, unless"
        " `gradient_as_bucket_view=True`. ZeRO-1 shards the optimizer's state"
        f" ({max(held(facts, 'DDP with ZeRO-1', 'optimizer state')):.2f} instead of"
        f" {max(held(facts, 'DDP', 'optimizer state')):.2f}) and nothing else: parameters and"
        " gradients"
        " stay whole.",
        "Each rank computes the whole forward, so it needs all parameters, and all activations of"
        " its"
        " batch. Sharded parameters are another algorithm: FSDP, or a model that is split over"
        " devices.",
    )


def _partitions(found: Found) -> Claim:
    facts = found["facts"]
    ddp = facts["replicas"]
    fsdp = held(facts, "FSDP", "parameters")
    return Claim(
        32,
        "DDP partitions the parameters over the nodes.",
        word([partitioned(facts)]),
        f"The model has {ddp['parameters of the model']:,} parameters; the ranks hold"
        f" {', '.join(f'{n:,}' for n in ddp['with DDP']['parameters per rank'])}. FSDP, which does"
        f" partition, holds {', '.join(f'{share:.2f}' for share in fsdp)} of them.",
        "What DDP partitions is the data. Its buckets divide the gradients by time, not over ranks:"
        " each rank has all of them.",
    )


def _slower(found: Found) -> Claim:
    ratio = {name: median(one["ddp of dp"]) for name, one in found["ways"].items()}
    return Claim(
        32,
        "DDP is slower than DataParallel on one node.",
        shown([value < 1 / FASTER for value in ratio.values()]),
        f"Steps per second of DDP over those of DataParallel's steps by hand: {listed(ratio)}.",
        "DataParallel pays in every step for copies of the module, for threads that wait for the"
        " GIL,"
        " and for a first device on which loss and sum of gradients wait for each other. DDP pays"
        " for"
        " an all-reduce that backward hides in part. What DDP has against it is the start: a"
        " process"
        " and an interpreter per replica.",
    )


def _first_node(found: Found) -> Claim:
    facts = found["facts"]
    star = traffic(facts, "over rank 0")
    mlp = next(iter(found["ways"].values()))["received per step"]
    whole = found_bytes(mlp)
    return Claim(
        32,
        "Gradients are sent to the first node.",
        word([not even(facts)]),
        f"{facts['wire']['buckets']} buckets, {kilobytes(facts['wire']['bytes of gradients'])} of"
        " gradients; sent / received per rank and step: "
        + ", ".join(f"{kilobytes(s)} / {kilobytes(r)}" for s, r in traffic(facts, "DDP step"))
        + f"; the ring's share is {kilobytes(ring_share(facts))}. Over rank 0 (written out, for"
        " comparison): "
        + ", ".join(f"{kilobytes(s)} / {kilobytes(r)}" for s, r in star)
        + f". DataParallel does gather: its first replica received {whole:.2f} times the gradients,"
        " the others none.",
        "In a ring every rank sends to one neighbour and receives from the other, 2 N (W - 1) / W"
        " bytes each ([picture](../docs/pictures/ring.svg)); rank 0 is special only when DDP is"
        " constructed, where its parameters are broadcast. gloo, as PyTorch uses it and as counted"
        " here, takes a ring; NCCL also takes trees, or lets the switch add up.",
    )


def found_bytes(received: Sequence[Found]) -> float:
    """Gradients that DataParallel's first replica received, over one replica's parameters."""
    return float(received[0]["gradients"] / received[1]["parameters"])


def _building_block(found: Found) -> Claim:
    calls = found["facts"]["calls"]
    others = parts_of_dp_called(found["facts"])
    return Claim(
        32,
        "DataParallel is a building block of DDP.",
        word([bool(others) or calls["DDP is a subclass"]]),
        f"A training with DDP went through while {', '.join(calls['made to raise'])} were made to"
        " raise."
        f" Of torch.nn.parallel it called {len(calls['of DDP'])} functions, {len(others)} of them"
        " outside of DDP's own file. DDP is"
        f" {'a' if calls['DDP is a subclass'] else 'no'} subclass of DataParallel.",
        "They share a name and a package. DDP imports `scatter_kwargs` and `gather` and has methods"
        " around them, left from the time when one process could drive several GPUs; nothing in a"
        " training calls them. Its own parts are the process group and the Reducer, in C++.",
    )


def memory_of(found: Found) -> tuple[list[float], float]:
    """(per replica of DataParallel, per rank of DDP), in multiples of the parameters; AdamW.

    Activations are left out: they are the same for both.
    """
    name = next(iter(found["ways"]))
    replicas = found["ways"][name]["held"]
    whole = replicas[0]["parameters"]
    kinds = ("parameters", "gradients", "buckets", "optimizer state")
    rank = sum(max(held(found["facts"], "DDP", what)) for what in kinds)
    return [sum(one.values()) / whole for one in replicas], rank


def _more_memory(found: Found) -> Claim:
    [first, *others], rank = memory_of(found)
    return Claim(
        32,
        "DataParallel uses more memory than DDP.",
        shown([first > rank, *(other > rank for other in others)]),
        f"Held at the end of backward, in multiples of the parameters, AdamW, without activations:"
        f" DataParallel's first replica {first:.2f}, others {max(others):.2f}; every rank of DDP"
        f" {rank:.2f}. Peaks on GPUs were not measured.",
        "DataParallel's first device has what all have, and the optimizer's state, the whole batch,"
        " all outputs and the sum of the gradients: of its devices it fills up first. A rank of DDP"
        " has an optimizer and its own buckets, the latter unless gradient_as_bucket_view=True."
        " Activations, the whole batch and the outputs on the first device are not counted here.",
    )


def _recurrent(found: Found) -> Claim:
    ratio = {name: median(one["ddp of dp"]) for name, one in found["ways"].items()}
    others = [value for name, value in ratio.items() if name != "rnn"]
    return Claim(
        33,
        "An RNN gains more from DDP over DataParallel than an MLP or a CNN does.",
        shown([ratio["rnn"] > FASTER * value for value in others]),
        f"DDP over DataParallel, steps per second: {listed(ratio)}.",
        "The reason given for it: replicas of many small modules, and threads in Python between"
        " tiny kernels. A model of few large kernels loses more by copying its parameters.",
    )
