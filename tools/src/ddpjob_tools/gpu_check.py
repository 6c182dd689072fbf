"""Check this package's promises on this machine's GPUs: `ddpjob gpu-check`.

Each check starts processes (prove/machine, prove/workload, chaos) and reads what they wrote: none
is in the way of another, and the command itself imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import ddpjob_contract as contract
from ddpjob_tools import verb
from ddpjob_tools.prove.run import ProofError, Run, environment, in_turn
from ddpjob_trainer.environment import TRACE
from ddpjob_trainer.errors import ConfigError

Verdict = Literal["PASS", "WARN", "FAIL", "SKIP"]
#: Verdict, what was measured, and what to do where it is WARN or FAIL.
Found = tuple[Verdict, str, str]

_DESCRIPTION = """\
Does ddpjob keep its promises on these GPUs? Run small trainings on all GPUs of this machine, kill
and hang some, and print one line per check: PASS, WARN, FAIL or SKIP, what was measured, the limit,
and what to do. It takes minutes, and all the GPUs.
"""

_EPILOG = """\
examples:
  ddpjob gpu-check                      all GPUs of this machine
  ddpjob gpu-check --quick              checks 1 to 4, a minute
  ddpjob gpu-check --checks 6,8         only these
  ddpjob gpu-check --device cpu --nproc 2    the checks that need no GPU

exit code: 0 no check failed, 1 one did, 64 there is no GPU (the driver's own words are shown)
"""
_PROVE = "ddpjob_tools.prove"
_GIB = 1 << 30
_SHM = 1 * _GIB
_FREE = 0.95
_HANG_SECONDS = 10
#: What takes longer hangs; the launcher's own deadlines end it long before.
_LIMIT_SECONDS = 900.0
_LAST = 3  # lines of output that describe a failed launch
_VERSIONS = ("torch", "cuda", "cudnn", "nccl", "driver")
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


# --- Launches -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One that has ended. ``results``: what its processes wrote, by rank. ``place``: its files."""

    code: int
    output: str
    results: list[dict[str, Any]]
    report: dict[str, Any]
    place: Path

    def needed(self) -> list[dict[str, Any]]:
        """Return the results. Raises ProofError unless it succeeded."""
        if self.code != 0:
            raise ProofError(self.why())
        return self.results

    def why(self) -> str:
        """Explain an unwanted end in a few words."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"exit code {self.code}: " + " | ".join(line[:200] for line in lines[-_LAST:])


@dataclass(frozen=True)
class Setup:
    """``facts``: what this machine has. ``directory``: for all that the checks write."""

    nproc: int
    cuda: bool
    directory: Path
    facts: Mapping[str, Any]
    #: By name: starting processes takes nearly all of the time, so checks share launches.
    launched: dict[str, Launch] = field(default_factory=dict)

    def trial(
        self, name: str, module: str, *words: str, env: Mapping[str, str] | None = None
    ) -> Launch:
        """Run a module of prove in ``nproc`` processes, once under this name."""
        place = self.directory / name
        files = ("--termination-log", str(place / "report.json"), "--events", str(place / "events"))
        [found] = self.launches({name: ("run", *files, *_module(module, words, place))}, env or {})
        return found

    def launches(
        self, wanted: Mapping[str, Sequence[str]], env: Mapping[str, str], most: int = 1
    ) -> Iterator[Launch]:
        """Start commands of ours, each once under its name; yield them as they end."""
        runs = {
            name: self._run(name, words, env)
            for name, words in wanted.items()
            if name not in self.launched
        }
        ended = in_turn([*runs.values()], most, _LIMIT_SECONDS)
        for name in wanted:
            if name in runs:
                self.launched[name] = _ended(next(ended), self.directory / name)
            yield self.launched[name]

    def _run(self, name: str, words: Sequence[str], env: Mapping[str, str]) -> Run:
        place = self.directory / name
        place.mkdir()
        hidden = {} if self.cuda else {"CUDA_VISIBLE_DEVICES": ""}
        # Only what is compiled here: another run's choice of kernels would be in the user's own.
        more = {TRACE: str(place / "trace"), "TORCHINDUCTOR_CACHE_DIR": str(place / "torch")}
        program = "ddpjob_trainer" if words[0] == "run" else "ddpjob_tools"
        command = (sys.executable, "-m", program, words[0], "--nproc", str(self.nproc))
        variables = environment(os.environ, place / "snapshots", {**more, **hidden, **env})
        return Run((*command, *words[1:]), variables, place / "log")


def _module(name: str, words: Sequence[str], place: Path) -> tuple[str, ...]:
    return ("-m", f"{_PROVE}.{name}", *words, "--out", str(place))


def _ended(run: Run, place: Path) -> Launch:
    files = sorted(place.glob("rank-*.json"), key=lambda path: int(path.stem[5:]))
    results = [json.loads(path.read_text()) for path in files]
    report = place / "report.json"
    ended = json.loads(report.read_text()) if report.exists() else {}
    return Launch(run.exit_code or 0, run.log.read_text(errors="replace"), results, ended, place)


def machine(directory: Path) -> dict[str, Any]:
    """Name what a result depends on; ``error``: the driver's words where there is no GPU."""
    command = (sys.executable, "-m", f"{_PROVE}.machine", "environment")
    run = Run(command, environment(os.environ, directory), directory / "machine")
    [_] = in_turn([run], 1, _LIMIT_SECONDS)
    output = run.log.read_text(errors="replace")
    try:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(
            f"torch cannot be imported (exit code {run.exit_code}): {output[-500:]}"
        ) from None
    return found


# --- Checks -------------------------------------------------------------------------------


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
    """``look`` yields what was found, once or several times."""

    number: int
    name: str
    look: Callable[[Setup], Iterator[Found]]
    gpu_only: bool = False

    def run(self, setup: Setup) -> Iterator[Finding]:
        """Look; a launch that fails is a failure of this check, not of the command."""
        if self.gpu_only and not setup.cuda:
            yield Finding(self.number, self.name, "SKIP", "means something on a GPU only")
            return
        try:
            for found in self.look(setup):
                yield Finding(self.number, self.name, *found)
        except ProofError as error:
            cure = "see the launcher's words above"
            yield Finding(self.number, self.name, "FAIL", str(error), cure)
        except (TimeoutError, OSError, KeyError, ValueError, IndexError) as error:
            what = f"not measured: {type(error).__name__}: {error}"
            yield Finding(self.number, self.name, "FAIL", what, "send us this line and --json")


def _environment(setup: Setup) -> Iterator[Found]:
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


def _spares(setup: Setup) -> Iterator[Found]:
    launch = setup.trial("spares", "workload", "--spares")
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
    return setup.trial(f"collectives-{number}", "machine", "collectives", *fill)


def _one_gpu_each(setup: Setup) -> Iterator[Found]:
    results = _collective(setup, 1).needed()
    uuids = {result["uuid"] for result in results}
    several = max(Counter(results[0]["processes"]).values(), default=0)
    shown = f"at most {several} processes on one (1)" if several else "nvidia-smi shows no process"
    yield (
        "FAIL" if len(uuids) != setup.nproc or several > 1 else "PASS" if several else "WARN",
        f"{setup.nproc} processes on {len(uuids)} GPUs, {shown}",
        "each process must set its device, that of LOCAL_RANK, before it touches CUDA",
    )


def _collectives(setup: Setup) -> Iterator[Found]:
    twice = [_collective(setup, number).needed() for number in (1, 2)]
    hashes = {result["sha256"] for results in twice for result in results}
    yield (
        "PASS" if len(hashes) == 1 else "FAIL",
        f"sums of all sizes, on all ranks, in 2 launches: {len(hashes)} results (1)",
        "set NCCL_ALGO=Ring, NCCL_PROTO=Simple and NCCL_NVLS_ENABLE=0, and check again",
    )


def _kills(setup: Setup, case: tuple[str, str, str]) -> tuple[str, ...]:
    """Have chaos kill a case twice; in the first one kill each rank."""
    model, level, precision = case
    kills = setup.nproc + 1 if case == _CASES[0] else 2
    place = setup.directory / _name(case)
    words = ("--model", model, "--level", level, "--precision", precision)
    steps = ("--steps", str(18 + 2 * kills))
    return (
        *("chaos", "--kills", str(kills), "--every", "3", "--signals", "KILL", "--points", "none"),
        *("--json", str(place / "rank-0.json"), *_module("workload", (*words, *steps), place)),
    )


def _name(case: tuple[str, str, str]) -> str:
    return "-".join(case)


def _killed(setup: Setup, cases: Sequence[tuple[str, str, str]]) -> Iterator[Launch]:
    # Nearly all of a case is starting processes, on one core each: a worker, and its spare.
    most = max(1, min(3, (os.cpu_count() or 1) // (2 * setup.nproc)))
    return setup.launches({_name(case): _kills(setup, case) for case in cases}, {}, most)


def _bits(setup: Setup) -> Iterator[Found]:
    # The CPU's compiler is in our own tests: it takes longer than all else here.
    cases = (*_CASES, _COMPILED) if setup.cuda else _CASES
    for (model, level, precision), launch in zip(cases, _killed(setup, cases), strict=True):
        said = "equal bits" if launch.code == 0 else launch.why()
        yield (
            "PASS" if launch.code == 0 else "FAIL",
            f"{_SHOWN[model]}, {precision}, level {level}, killed: {said}",
            "send us --json: this is what the package promises",
        )


def _each_lost(setup: Setup) -> Iterator[Found]:
    [launch] = _killed(setup, _CASES[:1])
    [result] = launch.needed()
    lost = {kill["victim"] for kill in result["kills"]} & set(range(setup.nproc))
    restarts = f"{len(result['restarts'])} restarts, {result['launches']} launches"
    yield (
        "PASS" if len(lost) == setup.nproc else "FAIL",
        f"{len(lost)} of {setup.nproc} ranks killed in turn, {restarts}; equal bits",
        "send us --json",
    )


def _full_memory(setup: Setup) -> Iterator[Found]:
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


def _hang(setup: Setup) -> Iterator[Found]:
    guilty = setup.nproc - 1
    env = {
        contract.HANG_STEP_SECONDS: str(_HANG_SECONDS), contract.HANG_STARTUP_SECONDS: "300",
        contract.IN_PLACE_MAX_WITHOUT_PROGRESS: "0",
    }  # fmt: skip
    launch = setup.trial("hang", "workload", "--hang", str(guilty), env=env)
    found = launch.report.get("kind"), launch.report.get("rank"), launch.code
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


# --- The command --------------------------------------------------------------------------


def _numbers(text: str) -> tuple[int, ...]:
    names = {str(check.number): check.number for check in CHECKS}
    odd = [word for word in text.split(",") if word.strip() not in names]
    if odd:
        raise argparse.ArgumentTypeError(f"{odd[0]!r} is no check: 1 to {max(names.values())}")
    return tuple(names[word.strip()] for word in text.split(","))


_OPTIONS: tuple[verb.Option, ...] = (
    ("--nproc N", int, None, "processes (default: one per GPU)"),
    ("--device", ("cuda", "cpu"), "cuda", "cpu: only the checks that need no GPU (default: cuda)"),
    ("--quick", bool, False, "checks 1 to 4 only"),
    ("--checks LIST", _numbers, None, "only these, as 1,6,8"),
    verb.JSON,
)


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    verb.add(
        commands, "gpu-check", "check what ddpjob promises on this machine's GPUs",
        _OPTIONS, description=_DESCRIPTION, epilog=_EPILOG,
    )  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Run the checks; return the exit code."""
    return verb.run("gpu-check", options, verb.with_processes, _check)


def _check(options: argparse.Namespace, directory: Path) -> int:
    cuda = options.device == "cuda"
    facts = machine(directory)
    gpus = len(facts["gpus"])
    if cuda and not gpus:
        verb.write(options.json, {"environment": facts, "checks": []})
        raise ConfigError(f"no GPU: {facts['error']}")
    if cuda and options.nproc is not None and options.nproc > gpus:
        raise ConfigError(f"--nproc {options.nproc}, but there are {gpus} GPUs: one process each")
    setup = Setup(options.nproc or (gpus if cuda else 2), cuda, directory, facts)
    wanted = options.checks or (QUICK if options.quick else tuple(c.number for c in CHECKS))
    found: list[Finding] = []
    for check in CHECKS:
        for finding in check.run(setup) if check.number in wanted else ():
            print(finding.line(), flush=True)
            found.append(finding)
    verb.write(options.json, {"environment": facts, "checks": [asdict(one) for one in found]})
    failed = sum(finding.verdict == "FAIL" for finding in found)
    print(f"{failed} failed of {len(found)}", flush=True)
    return 1 if failed else 0
