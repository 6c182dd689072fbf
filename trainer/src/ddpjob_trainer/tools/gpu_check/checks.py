"""What is checked, each with its limit and with what to do where it does not hold."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ddpjob_contract as contract
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.tools.gpu_check import launches
from ddpjob_trainer.tools.gpu_check.launches import Launch, Setup

Verdict = Literal["PASS", "WARN", "FAIL", "SKIP"]

_GIB = 1 << 30
_SHM = 1 * _GIB
_FREE = 0.95
_STALL = 0.01
_SPEED = 0.97
_MEMORY = 1.25
_SYNCS = 1.0
_HANG_SECONDS = 10
#: Where DDP's buckets and a step's kernels are warm.
_WARM = 10
_VERSIONS = ("torch", "cuda", "cudnn", "nccl", "driver")
_NO_GPU = "means something on a GPU only"
#: Of a training whose GPU has tens of milliseconds of work in a step, as those that are worth one.
_LONG_STEP = ("--model", "wide", "--width", "8192", "--batch", "4096")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``cure``: what to do, "" where nothing is to be done."""

    number: int
    name: str
    verdict: Verdict
    measured: str
    cure: str = ""

    def line(self) -> str:
        """For people."""
        cure = f"; {self.cure}" if self.cure and self.verdict in ("WARN", "FAIL") else ""
        return f"{self.verdict}  {self.number:>2} {self.name}: {self.measured}{cure}"


@dataclass(frozen=True, slots=True)
class Check:
    """``look`` yields (verdict, measured, cure), or several."""

    number: int
    name: str
    look: Callable[[Setup], Iterator[tuple[Verdict, str, str]]]
    gpu_only: bool = False

    def run(self, setup: Setup) -> Iterator[Finding]:
        """Look; a launch that does not end is a failure of this check, not of the command."""
        if self.gpu_only and not setup.cuda:
            yield Finding(self.number, self.name, "SKIP", _NO_GPU)
            return
        try:
            for found in self.look(setup):
                yield Finding(self.number, self.name, *found)
        except (TimeoutError, OSError, KeyError, ValueError, IndexError) as error:
            what = f"cannot be told: {type(error).__name__}: {error}"
            yield Finding(self.number, self.name, "FAIL", what, "send us this line and --json")


def environment(directory: Path) -> dict[str, Any]:
    """Name what a result depends on; ``error``: the driver's words where there is no GPU."""
    code, output = launches.alone("probe", "environment")
    try:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(f"torch cannot be imported (exit code {code}): {output[-500:]}") from None
    return found


def _ended(launch: Launch, code: int = 0) -> tuple[Verdict, str, str] | None:
    """Return a failure if it did not end as it must."""
    return None if launch.code == code else ("FAIL", launch.why(), "see the launcher's words above")


def _environment(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    facts = setup.facts
    gpus = Counter(gpu["name"] for gpu in facts["gpus"])
    names = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    versions = ", ".join(f"{name} {facts[name] or '-'}" for name in _VERSIONS)
    yield (
        "PASS" if len(gpus) <= 1 else "WARN",
        f"{names}; {versions}",
        "GPUs of one kind: the slowest sets the pace, and bits may differ between kinds",
    )
    shm = facts["shm_bytes"]
    yield (
        "PASS" if shm >= _SHM else "WARN",
        f"/dev/shm has {shm / _GIB:.1f} GiB (>= {_SHM / _GIB:g})",
        "mount an emptyDir with medium Memory there, as the operator does",
    )


def _spares(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    launch = launches.run(
        setup, "workload", "--until-spares", options=("--spares", str(setup.nproc))
    )
    if failed := _ended(launch):
        yield failed
        return
    held, count = launch.results[0]["held"], launch.results[0]["waiting"]
    said = next((li for li in launch.output.splitlines() if "no warm spares" in li), "")
    yield (
        "PASS" if count and not held and not said else "FAIL",
        said or f"{held} of {count} waiting processes have opened the driver (0)",
        "send us this line: no import of ours may initialise CUDA",
    )


def _one_gpu_each(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    launch = _collective(setup, 1)
    if failed := _ended(launch):
        yield failed
        return
    uuids = {result["uuid"] for result in launch.results}
    several = max(Counter(launch.results[0]["processes"]).values(), default=0)
    shown = f"at most {several} processes on one (1)" if several else "nvidia-smi shows no process"
    yield (
        "FAIL" if len(uuids) != setup.nproc or several > 1 else "PASS" if several else "WARN",
        f"{setup.nproc} processes on {len(uuids)} GPUs, {shown}",
        "each process must set its device, that of LOCAL_RANK, before it touches CUDA",
    )


def _collectives(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    twice = [_collective(setup, number) for number in (1, 2)]
    for launch in twice:
        if failed := _ended(launch):
            yield failed
            return
    hashes = {result["sha256"] for launch in twice for result in launch.results}
    yield (
        "PASS" if len(hashes) == 1 else "FAIL",
        f"sums of all sizes, on all ranks, in 2 launches: {len(hashes)} results (1)",
        "set NCCL_ALGO=Ring, NCCL_PROTO=Simple and NCCL_NVLS_ENABLE=0, and check again",
    )
    first = twice[0].results[0]
    speeds = [_bus(int(size), seconds, setup.nproc) for size, seconds in first["seconds"].items()]
    yield "PASS", f"began in {first['init_seconds']:.1f} s; bus: {', '.join(speeds)}", ""


def _collective(setup: Setup, number: int) -> Launch:
    """Share the first launch with check 3."""
    return setup.once(f"collectives {number}", lambda: launches.run(setup, "probe", "collectives"))


def _bus(size: int, seconds: float, nproc: int) -> str:
    if size < 1 << 20:  # of which only the way is felt
        return f"{size >> 10} KiB in {seconds * 1e6:.0f} us"
    share = 2 * (nproc - 1) / nproc  # what each process sends, of the tensor
    return f"{size >> 20} MiB at {share * size / seconds / 1e9:.2f} GB/s"


def _bits(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    kinds = [("cnn", "resume"), ("transformer", "resume"), ("transformer", "elastic")]
    cases = [(*kind, precision) for kind in kinds for precision in ("fp32", "bf16", "fp16")]

    def kill(case: tuple[str, str, str]) -> Launch:
        model, level, precision = case
        given = ("--model", model, "--level", level, "--precision", precision)
        return launches.chaos(setup, *given, kills=2)

    # Nearly all of a case is starting processes, on one core each: side by side they take a third.
    with ThreadPoolExecutor(_side_by_side(setup.nproc)) as pool:
        for (model, level, precision), launch in zip(cases, pool.map(kill, cases), strict=True):
            said = "equal bits" if launch.code == 0 else launch.why()
            yield (
                "PASS" if launch.code == 0 else "FAIL",
                f"{model}, {precision}, level {level}, killed twice: {said}",
                "send us --json: this is what the package promises",
            )


def _side_by_side(nproc: int) -> int:
    return max(1, min(3, (os.cpu_count() or 1) // (2 * nproc)))  # a worker, and its spare


def _full_memory(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    launch = launches.run(setup, "probe", "fill")
    if failed := _ended(launch):
        yield failed
        return
    least = min(result["free"] / result["before"] for result in launch.results)
    failure, begun = (_event(launch.place, name)["time"] for name in ("failure", "end"))
    told = f"killed with memory full: {least:.0%} of what was free is free at the next start"
    yield (
        "PASS" if least >= _FREE else "FAIL",
        f"{told} (>= {_FREE:.0%})",
        "something else uses this GPU, or its driver gives memory back late",
    )
    yield "PASS", f"next round and end within {begun - failure:.1f} s", ""


def _hang(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    guilty = setup.nproc - 1
    limits = {contract.HANG_STEP_SECONDS: str(_HANG_SECONDS), contract.HANG_STARTUP_SECONDS: "300"}
    options = ("--max-rounds-without-progress", "0")
    launch = launches.run(
        setup, "workload", "--hang", str(guilty), options=options, env=limits
    )  # fmt: skip
    told = launch.report
    named = f"rank {told.get('rank', '-')}, {told.get('kind', '-')}, exit code {launch.code} (76)"
    right = (told.get("kind"), told.get("rank"), launch.code) == ("hang", guilty, 76)
    yield (
        "PASS" if right else "FAIL",
        f"rank {guilty} hung; named: {named}",
        "send us --json and the log",
    )


def _each_lost(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    steps = ("--steps", str(8 + 2 * setup.nproc))
    calm = launches.run(setup, "workload", *steps)
    limit = ("--max-rounds-without-progress", str(setup.nproc + 1))
    wild = launches.run(setup, "workload", *steps, "--every", "2", "--lose-each", options=limit)
    for launch in (calm, wild):
        if failed := _ended(launch):
            yield failed
            return
    rounds = sum(event["event"] == "failure" for event in _events(wild.place))
    same = calm.results[0]["sha256"] == wild.results[0]["sha256"]
    yield (
        "PASS" if same and rounds == setup.nproc else "FAIL",
        f"{rounds} of {setup.nproc} ranks lost in turn; weights {'equal' if same else 'DIFFERENT'}",
        "send us --json: this is what the package promises",
    )


def _staging(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    size, every = (_LONG_STEP if setup.cuda else ("--model", "wide")), 20
    given = (*size, "--steps", "101", "--every", str(every))
    launch = launches.run(setup, "workload", *given)
    if failed := _ended(launch):
        yield failed
        return
    usual, held = stall(launch.results[0]["seconds"], every)
    share = held / (every * usual)
    mib = sum(file.stat().st_size for file in _newest(launch.place / "snapshots")) / (1 << 20)
    told = f"{held * 1e3:.1f} ms a snapshot of {mib:,.0f} MiB"
    yield (
        "PASS" if share <= _STALL else "WARN",
        f"{told}, {share:.1%} of {every} steps of {usual:.4f} s (<= {_STALL:.0%})",
        "snapshots less often (everySteps)",
    )


def stall(seconds: Sequence[float], every: int) -> tuple[float, float]:
    """Of a step: its usual seconds, and those that a snapshot adds.

    ``seconds``: from the begin of one step's body to that of the next, from the first step on. A
    host that is ahead of its GPU waits for it at a snapshot, and is back in the step after; what
    the copy itself holds up comes with the next update.
    """
    usual = statistics.median(seconds[_WARM:])
    saved = range(-(-(_WARM + 1) // every) * every, len(seconds) - 1, every)
    windows = [seconds[step - 1 : step + 2] for step in saved]
    return usual, max(0.0, statistics.mean(sum(window) - 3 * usual for window in windows))


def _newest(snapshots: Path) -> list[Path]:
    """List the data files of the newest snapshot."""
    files = sorted(snapshots.rglob("*.safetensors"))
    return [file for file in files if file.name.split("-")[:2] == files[-1].name.split("-")[:2]]


def _speed(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    plain, ours = _beside_plain(setup)
    for launch in (plain, ours):
        if failed := _ended(launch):
            yield failed
            return
    ratio = _usual(plain) / _usual(ours)
    yield (
        "PASS" if ratio >= _SPEED else "WARN",
        f"level resume runs at {ratio:.3f} of plain DDP (>= {_SPEED})",
        "for a step of milliseconds that is expected; send us --json for a longer one",
    )
    if not setup.cuda:
        yield "SKIP", f"host synchronisations per step, memory peaks: {_NO_GPU}", ""
        return
    syncs = [_syncs(launch) for launch in (plain, ours)]
    yield (
        "PASS" if syncs[1] <= syncs[0] + _SYNCS else "WARN",
        f"host synchronisations per step: {syncs[1]:.1f}, plain DDP {syncs[0]:.1f}",
        "send us --json",
    )


def _beside_plain(setup: Setup) -> tuple[Launch, Launch]:
    """Train by plain DDP, and at level resume; for checks 10 and 11."""
    given = (*(_LONG_STEP if setup.cuda else ()), "--steps", "120")
    return (
        setup.once("plain", lambda: launches.run(setup, "workload", *given, "--plain")),
        setup.once(
            "ours",
            lambda: launches.run(setup, "workload", *given, env={contract.SNAPSHOT_DIR: ""}),
        ),
    )


def _memory(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    plain, ours = _beside_plain(setup)
    for launch in (plain, ours):
        if failed := _ended(launch):
            yield failed
            return
    for step in (1, 10):
        theirs, mine = (launch.results[0]["peaks"][step] for launch in (plain, ours))
        yield (
            "PASS" if mine <= theirs * _MEMORY else "WARN",
            f"peak of step {step}: {mine / theirs:.2f} of plain DDP's (<= {_MEMORY:g})",
            "level off needs least",
        )


def _usual(launch: Launch) -> float:
    return float(statistics.median(launch.results[0]["seconds"][_WARM:]))


def _syncs(launch: Launch) -> float:
    """Of a step, on the first rank."""
    so_far = launch.results[0]["syncs"][_WARM:]
    return float(so_far[-1] - so_far[0]) / (len(so_far) - 1)


def _events(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]


def _event(place: Path, name: str) -> dict[str, Any]:
    return next(event for event in _events(place) if event["event"] == name)


CHECKS: Sequence[Check] = (
    Check(1, "environment", _environment),
    Check(2, "fork server and spares hold no GPU", _spares),
    Check(3, "one process per GPU", _one_gpu_each, gpu_only=True),
    Check(4, "collectives", _collectives),
    Check(5, "bits after kills", _bits),
    Check(6, "killed with memory full", _full_memory, gpu_only=True),
    Check(7, "who hangs is named", _hang),
    Check(8, "each rank lost in turn", _each_lost),
    Check(9, "stall of a snapshot", _staging),
    Check(10, "speed", _speed),
    Check(11, "memory", _memory, gpu_only=True),
)
QUICK = (1, 2, 3, 4)
