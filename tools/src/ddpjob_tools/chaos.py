"""Run a script undisturbed, then under kills, and compare every bit: `ddpjob chaos`."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from ddpjob_contract import ExitCode
from ddpjob_tools import verb
from ddpjob_tools.prove import compare
from ddpjob_tools.prove.disturb import Disturbance, Made, Pace
from ddpjob_tools.prove.kill import SIGNALS, plan_kills
from ddpjob_tools.prove.record import Records, open_gate
from ddpjob_tools.prove.run import (
    LOOK_SECONDS,
    TRACE_FILE,
    ProofError,
    Run,
    environment_of_job,
    launcher,
)
from ddpjob_trainer.arguments import whole
from ddpjob_trainer.environment import RESCUE
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.failpoints import GATE, OPEN, POINTS

_DESCRIPTION = """\
Does training survive? Run a script undisturbed, then once more while its processes are killed, and
compare every bit: each rank's loss of every step, parameters, buffers, optimizer, scheduler,
whatever else is registered, and random number generators.

The script is started by `ddpjob-trainer run` and needs no change; it must train with this library
and leave Snapshots.directory to the environment. Kills come at random instants and at named points,
to any rank and to the launcher, also while processes still come back from the kill before. When the
launcher ends, chaos starts the next attempt, as the operator does in a cluster.
"""

_EPILOG = """\
examples:
  ddpjob chaos --nproc 4 --kills 20 --seed 1 train.py --lr 0.1
  ddpjob chaos --nproc 3 --kills 10 --signals KILL --points none train.py
  ddpjob chaos --nproc 3 --kills 5 --keep evidence -m package.train

exit code: 0 identical, 1 DIFFERENT or training did not come back, 3 nothing shown (no restart went
on from a snapshot), 64 not possible as asked
"""
_NOTHING_SHOWN = 3
_NAMES = {s.name.removeprefix("SIG"): s for s in SIGNALS}
_LEAST_HANG_SECONDS = 5.0
_SLOWEST_STEPS = 20  # a step that takes so many times the slowest one hangs


def _signals(text: str) -> tuple[Signals, ...]:
    return tuple(_NAMES[name] for name in _listed(text.upper().replace("SIG", ""), _NAMES))


def _points(text: str) -> tuple[str, ...]:
    names = _listed(text, ("all", "none", *POINTS))
    return POINTS if "all" in names else tuple(name for name in names if name != "none")


def _listed(text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


_OPTIONS: tuple[verb.Option, ...] = (
    ("--nproc N", int, verb.REQUIRED, "processes on this machine"),
    ("--kills N", int, 20, "how many (default: 20)"),
    ("--seed N", int, 1, "draws the kills (default: 1)"),
    ("--signals LIST", _signals, SIGNALS,
     ("of KILL,TERM,STOP (default: all). Half of the stopped processes are continued after a"
      " moment, the others must be found by the hang detection")),
    ("--points LIST", _points, POINTS,
     f"all (default), none, or of {','.join(POINTS)}; other kills come at random instants"),
    ("--every N", int, 5, "steps between snapshots (default: 5)"),
    *verb.of_program(120.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome. ``differences`` empty: the two runs are equal bit for bit.

    ``restarts``: see Records.restarts().
    """

    made: list[Made]
    launches: int
    restarts: list[int | None]
    pace: Pace
    undisturbed_sha256: str
    disturbed_sha256: str
    differences: list[str]
    again: int = 0  # steps done once more
    #: Of each kill, seconds until all ranks were past what was done before it.
    past: Sequence[float] = ()
    #: What they came to, for each kill with a restart in place.
    rescues: Mapping[str, int] = field(default_factory=dict)

    @property
    def went_on(self) -> list[int]:
        """Return the steps after which restarts continued from a snapshot."""
        return [step for step in self.restarts if step]

    @property
    def verdict(self) -> str:
        """Return the result; a run without a resume shows nothing about snapshots."""
        if self.differences:
            return "DIFFERENT"
        if self.went_on:
            return "identical"
        return (
            f"nothing shown: of {len(self.restarts)} restarts none went on from a snapshot. One is"
            f" made every {self.pace.every} steps, and the run has {self.pace.total_steps}: lower"
            " --every, or ddp.Snapshots(every=...) in the script; choose more --kills, or --signals"
            " KILL; or have the script train longer"
        )


def add(commands: Any) -> None:
    """Describe the command to argparse."""
    verb.add(
        commands, "chaos",
        "kill training at random and compare with an undisturbed run, bit for bit",
        _OPTIONS, ("PROGRAM", "a script (*.py), or an executable"), description=_DESCRIPTION,
        epilog=_EPILOG,
    )  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    return verb.run("chaos", options, _checked, _report, evidence=(1, _NOTHING_SHOWN))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    verb.check(options)
    for name in ("kills", "every"):
        whole(f"--{name}", getattr(options, name), least=1)
    is_script = options.program.endswith(".py") and not options.module
    if is_script and not Path(options.program).is_file():
        raise ConfigError(f"{options.program}: no such script")
    return options


def _report(options: argparse.Namespace, folder: Path) -> int:
    result = prove(options, folder)
    print(f"sha256 undisturbed {result.undisturbed_sha256}")
    print(f"sha256 disturbed   {result.disturbed_sha256}")
    for difference in result.differences:
        print(f"  {difference}")
    print(result.verdict, flush=True)
    verb.write(options.json, _as_json(options, result))
    return {"identical": 0, "DIFFERENT": 1}.get(result.verdict, _NOTHING_SHOWN)


def _as_json(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    kills = [
        {**asdict(made.kill), "signal": made.kill.signal.name, "how": made.how}
        | ({"seconds": round(made.seconds, 4)} if made.seconds else {})
        for made in result.made
    ]
    return {
        "identical": result.verdict == "identical",
        "verdict": result.verdict,
        "nproc": options.nproc,
        "seed": options.seed,
        "kills": kills,
        "launches": result.launches,
        "restarts": result.restarts,
        "undisturbed_sha256": result.undisturbed_sha256,
        "disturbed_sha256": result.disturbed_sha256,
        "steps_again": result.again,
        "past_seconds": [round(one, 4) for one in result.past],
        "rescues": result.rescues,
        "differences": result.differences,
    }


def prove(options: argparse.Namespace, folder: Path) -> Result:
    """Do both runs. Raises ConfigError, ProofError; leaves no process behind."""
    undisturbed, pace = _undisturbed(options, folder / "undisturbed")
    _say(
        f"undisturbed: {pace.total_steps} steps of {pace.step_seconds:.3f} s on {options.nproc}"
        f" ranks, a snapshot every {pace.every}, weights {compare.weights(undisturbed.stories)}"
    )
    kills = plan_kills(
        seed=options.seed, count=options.kills, nproc=options.nproc, total_steps=pace.total_steps,
        epoch=pace.epoch, every=pace.every, signals=options.signals, points=options.points,
    )  # fmt: skip
    directory = folder / "disturbed"
    slowest = max(_LEAST_HANG_SECONDS, _SLOWEST_STEPS * pace.step_seconds)
    job, records = _prepared(options, directory, slowest)
    disturbance = Disturbance(job, records, directory, pace, options.patience, _say)
    try:
        disturbance.run(kills)
    except ProofError as error:
        raise ProofError(f"{error}. The end of its output:\n{job.tail()}") from None
    finally:
        job.end()
    rescues = _rescues(directory / TRACE_FILE, disturbance.made)
    if "saved" in rescues:  # what a killed process had not recorded of a step that others saved
        for one, other in zip(undisturbed.stories, records.stories, strict=True):
            other.losses = {**one.losses, **other.losses}
    result = Result(
        made=disturbance.made,
        launches=job.attempt,
        restarts=records.restarts(),
        pace=pace,
        undisturbed_sha256=compare.sha256(undisturbed.stories, undisturbed.stories),
        disturbed_sha256=compare.sha256(records.stories, undisturbed.stories),
        differences=compare.differences(undisturbed.stories, records.stories),
        again=records.again,
        past=[
            at - made.at
            for made in disturbance.made
            if made.seconds and (at := records.passed_at(made.done + 1)) is not None
        ],
        rescues=rescues,
    )
    _say(f"disturbed:   {_summary(result.made)}, weights {compare.weights(records.stories)}")
    steps = ", ".join(map(str, result.went_on)) or "-"
    _say(
        f"restarts:    {len(result.restarts)}, {len(result.went_on)} of which went on from a"
        f" snapshot, after step {steps}"
    )
    past = f"{statistics.median(result.past):.2f} s" if result.past else "-"
    _say(
        f"done again:  {result.again} steps; median from a kill until all ranks were past what was"
        f" done before: {past}"
    )
    if result.rescues:
        came = ", ".join(f"{count} {what}" for what, count in sorted(result.rescues.items()))
        _say(f"rescues:     {came}")
    return result


def _rescues(trace: Path, made: Collection[Made]) -> dict[str, int]:
    """Count what the rescue after each kill came to, as the launcher has marked it."""
    lines = [json.loads(line) for line in trace.read_text().splitlines() if '"rescue"' in line]
    if os.environ.get(RESCUE) == "0":
        return {}
    found: Counter[str] = Counter()
    ends = [*(one.at for one in made), math.inf][1:]
    for one, end in zip(made, ends, strict=True):
        came = [line["came_to"] for line in lines if one.at <= line["t"] < end]
        if came or one.how == "in place":
            found["saved" if "saved" in came else came[0] if came else "nobody was asked"] += 1
    return dict(found)


def _say(text: str) -> None:
    print(text, flush=True)


def _summary(made: Collection[Made]) -> str:
    texts = []
    for how in ("in place", "new launch", "went on", "finished", ""):
        times = [one.seconds for one in made if one.how == how]
        if times:
            median = statistics.median(times)
            texts.append(f"{len(times)} {how or 'killed again before it was back'}")
            texts[-1] += f" (median {median:.2f} s)" if median else ""
    return f"{len(made)} kills: {', '.join(texts)}"


def _prepared(
    options: argparse.Namespace, directory: Path, hang_seconds: float | None = None
) -> tuple[Run, Records]:
    directory.mkdir()
    open_gate(directory / GATE, OPEN)
    uid = f"chaos-{directory.name}-{secrets.token_hex(4)}"
    environment = environment_of_job(os.environ, directory, uid, options.every, hang_seconds)
    program = (*["-m"] * options.module, options.program, *options.arguments)
    job = Run(launcher(options.nproc, *program), environment, directory / "log")
    return job, Records(directory, options.nproc)


def _undisturbed(options: argparse.Namespace, directory: Path) -> tuple[Records, Pace]:
    """Run undisturbed, once. Raises ConfigError for a script that cannot be compared."""
    job, records = _prepared(options, directory)
    began = time.monotonic()
    try:
        job.start()
        while job.running():
            time.sleep(LOOK_SECONDS)
            records.look()
            _check_directory(records, directory)
    finally:
        job.end()
    records.look()
    if job.exit_code != ExitCode.SUCCESS:
        raise ProofError(
            f"the undisturbed run failed with exit code {job.exit_code}; see that the script runs"
            f" to its end. The end of its output:\n{job.tail()}"
        )
    for rank, story in enumerate(records.stories):
        if story.step and not story.hashes:
            raise ConfigError(
                f"rank {rank} left the loop after step {story.step}, and the script ended without"
                " run.finish(): training may not have been over. Call run.finish() after"
                " the loop"
            )
        if not story.hashes:
            raise ConfigError(
                "the script did not train with ddpjob_trainer.start() and run.steps() on every"
                " rank: chaos can only compare what the library records. Train with them, or try"
                " `ddpjob audit`, which needs no library"
            )
    return records, _pace(records, began)


def _check_directory(records: Records, directory: Path) -> None:
    for story in records.stories:
        given = story.facts.get("directory", str(directory / "snapshots"))
        if given != str(directory / "snapshots"):
            raise ConfigError(
                f"the script keeps snapshots in {given}, by ddp.Snapshots(directory=...): leave"
                " it out, or take it from the environment, so that chaos can choose one"
            )


def _pace(records: Records, began: float) -> Pace:
    story = records.stories[0]
    if story.facts["every"] is None:
        raise ConfigError(
            "the script has ddp.Snapshots(every='Auto'): leave it out, or take a number, for kills"
            " come at steps between two snapshots"
        )
    steps = max(1, len(story.losses))
    return Pace(
        total_steps=story.step,  # the script may end before the steps asked for
        epoch=story.epoch,
        every=int(story.facts["every"]),
        step_seconds=max(0.001, (story.last_at - story.progress_at) / steps),
        start_seconds=max(0.1, story.progress_at - began),
    )
