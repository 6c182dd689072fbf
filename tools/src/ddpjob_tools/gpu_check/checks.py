"""Check each promise: its limit, the measured value, and a cure where it fails."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import ddpjob_contract as contract
from ddpjob_tools.gpu_check import launches
from ddpjob_tools.gpu_check.launches import Launch, LaunchError, Setup
from ddpjob_trainer.errors import ConfigError

Verdict = Literal["PASS", "WARN", "FAIL", "SKIP"]

_GIB = 1 << 30
_SHM = 1 * _GIB
_FREE = 0.95
_HANG_SECONDS = 10
_VERSIONS = ("torch", "cuda", "cudnn", "nccl", "driver")
_NO_GPU = "means something on a GPU only"
#: Model, level and precision. Each precision and each level once: their code is apart.
_CASES = (
    ("both", "resume", "fp32"), ("both", "resume", "bf16"), ("both", "resume", "fp16"),
    ("transformer", "elastic", "fp16"),
)  # fmt: skip
#: Undisturbed with torch's caches empty, then killed with what that has left in them.
_COMPILED = ("compiled", "resume", "bf16")
_SHOWN = {
    "both": "CNN and transformer",
    "transformer": "transformer",
    "compiled": "transformer by torch.compile",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``cure``: what to do, "" where nothing is to be done."""

    number: int
    name: str
    verdict: Verdict
    measured: str
    cure: str = ""

    def line(self) -> str:
        """Return the line for people."""
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
        """Look; a launch that fails is a failure of this check, not of the command."""
        if self.gpu_only and not setup.cuda:
            yield Finding(self.number, self.name, "SKIP", _NO_GPU)
            return
        try:
            for found in self.look(setup):
                yield Finding(self.number, self.name, *found)
        except LaunchError as error:
            cure = "see the launcher's words above"
            yield Finding(self.number, self.name, "FAIL", str(error), cure)
        except (TimeoutError, OSError, KeyError, ValueError, IndexError) as error:
            what = f"cannot be told: {type(error).__name__}: {error}"
            yield Finding(self.number, self.name, "FAIL", what, "send us this line and --json")


def environment() -> dict[str, Any]:
    """Name what a result depends on; ``error``: the driver's words where there is no GPU."""
    code, output = launches.alone("machine", "environment")
    try:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(f"torch cannot be imported (exit code {code}): {output[-500:]}") from None
    return found


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
    launch = launches.run(setup, "spares", "workload", "--spares")
    first = launch.needed()[0]
    said = next((li for li in launch.output.splitlines() if "no warm spares" in li), "")
    yield (
        "PASS" if first["waiting"] and not first["held"] and not said else "FAIL",
        said or f"{first['held']} of {first['waiting']} waiting processes opened the driver (0)",
        "send us this line: no import of ours may initialise CUDA",
    )


def _collective(setup: Setup, number: int) -> Launch:
    """Launch the collectives; the second time a process dies then with its GPU's memory full."""
    fill = ("--fill",) if setup.cuda and number == 2 else ()
    return launches.run(setup, f"collectives-{number}", "machine", "collectives", *fill)


def _one_gpu_each(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    results = _collective(setup, 1).needed()
    uuids = {result["uuid"] for result in results}
    several = max(Counter(results[0]["processes"]).values(), default=0)
    shown = f"at most {several} processes on one (1)" if several else "nvidia-smi shows no process"
    yield (
        "FAIL" if len(uuids) != setup.nproc or several > 1 else "PASS" if several else "WARN",
        f"{setup.nproc} processes on {len(uuids)} GPUs, {shown}",
        "each process must set its device, that of LOCAL_RANK, before it touches CUDA",
    )


def _collectives(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    twice = [_collective(setup, number).needed() for number in (1, 2)]
    hashes = {result["sha256"] for results in twice for result in results}
    yield (
        "PASS" if len(hashes) == 1 else "FAIL",
        f"sums of all sizes, on all ranks, in 2 launches: {len(hashes)} results (1)",
        "set NCCL_ALGO=Ring, NCCL_PROTO=Simple and NCCL_NVLS_ENABLE=0, and check again",
    )


def _killed(setup: Setup, case: tuple[str, str, str]) -> Launch:
    """Have chaos kill a case twice; in the first one kill each rank."""
    model, level, precision = case
    kills = setup.nproc + 1 if case == _CASES[0] else 2
    words = ("--model", model, "--level", level, "--precision", precision)
    steps = ("--steps", str(18 + 2 * kills))
    return launches.chaos(setup, "-".join(case), *words, *steps, kills=kills)


def _bits(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    # The CPU's compiler is in our own tests: it takes longer than all else here.
    cases = (*_CASES, _COMPILED) if setup.cuda else _CASES
    # Nearly all of a case is starting processes, on one core each: side by side they take a third.
    with ThreadPoolExecutor(_side_by_side(setup.nproc)) as pool:
        killed = pool.map(lambda case: _killed(setup, case), cases)
        for (model, level, precision), launch in zip(cases, killed, strict=True):
            said = "equal bits" if launch.code == 0 else launch.why()
            yield (
                "PASS" if launch.code == 0 else "FAIL",
                f"{_SHOWN[model]}, {precision}, level {level}, killed: {said}",
                "send us --json: this is what the package promises",
            )


def _side_by_side(nproc: int) -> int:
    return max(1, min(3, (os.cpu_count() or 1) // (2 * nproc)))  # a worker, and its spare


def _each_lost(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    [result] = _killed(setup, _CASES[0]).needed()
    lost = {kill["victim"] for kill in result["kills"]} & set(range(setup.nproc))
    restarts = f"{len(result['restarts'])} restarts, {result['launches']} launches"
    yield (
        "PASS" if len(lost) == setup.nproc else "FAIL",
        f"{len(lost)} of {setup.nproc} ranks killed in turn, {restarts}; equal bits",
        "send us --json",
    )


def _full_memory(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    launch = _collective(setup, 2)
    least = min(result["free"] / result["before"] for result in launch.needed())
    text = (launch.place / "events").read_text()
    times = {one["event"]: one["time"] for one in map(json.loads, text.splitlines())}
    back = f"next round and end within {times['end'] - times['failure']:.1f} s"
    yield (
        "PASS" if least >= _FREE else "FAIL",
        f"{least:.0%} of what was free is free at the next start (>= {_FREE:.0%}); {back}",
        "something else uses this GPU, or its driver gives memory back late",
    )


def _hang(setup: Setup) -> Iterator[tuple[Verdict, str, str]]:
    guilty = setup.nproc - 1
    env = {
        contract.HANG_STEP_SECONDS: str(_HANG_SECONDS), contract.HANG_STARTUP_SECONDS: "300",
        contract.IN_PLACE_MAX_WITHOUT_PROGRESS: "0",
    }  # fmt: skip
    launch = launches.run(setup, "hang", "workload", "--hang", str(guilty), env=env)
    told = launch.report
    found = told.get("kind"), told.get("rank"), launch.code
    kind, rank, code = (one if one is not None else "-" for one in found)
    yield (
        "PASS" if found == ("hang", guilty, 76) else "FAIL",
        f"rank {guilty} hung; named: rank {rank}, {kind}, exit code {code} (76)",
        "send us --json and the log",
    )


CHECKS: Sequence[Check] = (
    Check(1, "environment", _environment),
    Check(2, "fork server and spares hold no GPU", _spares),
    Check(3, "one process per GPU", _one_gpu_each, gpu_only=True),
    Check(4, "collectives", _collectives),
    Check(5, "bits after kills", _bits),
    Check(6, "killed with memory full", _full_memory, gpu_only=True),
    Check(7, "who hangs is named", _hang),
    Check(8, "each rank lost in turn", _each_lost),
)
QUICK = (1, 2, 3, 4)
