"""Run a script twice, undisturbed and disturbed, and report on both. command.py calls run()."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import ddpjob_contract as contract
from ddpjob_tools.prove import compare
from ddpjob_tools.prove.disturb import ChaosError, Disturbance, Made, Pace
from ddpjob_tools.prove.kill import plan_kills
from ddpjob_tools.prove.record import Records, open_gate
from ddpjob_tools.prove.run import Job, environment_of_job
from ddpjob_trainer.environment import CHAOS
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.failpoints import GATE, OPEN

_LOOK_SECONDS = 0.05
_LEAST_HANG_SECONDS = 5.0
_SLOWEST_STEPS = 20  # a step that takes so many times the slowest one hangs


@dataclass(frozen=True, slots=True)
class Settings:
    """The script and its disturbance. ``program``: arguments of `ddpjob-trainer run`."""

    program: tuple[str, ...]
    nproc: int
    kills: int
    seed: int
    signals: tuple[Signals, ...]
    points: tuple[str, ...]
    every: int
    patience: float
    directory: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome. ``differences`` empty: the two runs are equal bit for bit.

    ``restarts``: see Records.restarts().
    """

    made: list[Made]
    launches: int
    restarts: list[int | None]
    pace: Pace
    calm: str
    wild: str
    differences: list[str]

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
            " --every, or snapshot_every where the script gives it to start(); choose more --kills,"
            " or --signals KILL; or have the script train longer"
        )


def run(settings: Settings, say: Callable[[str], None]) -> Result:
    """Do both runs. Raises ConfigError, ChaosError; leaves no process behind."""
    calm, pace = _calm(settings)
    say(
        f"undisturbed: {pace.total_steps} steps of {pace.step_seconds:.3f} s on {settings.nproc}"
        f" ranks, a snapshot every {pace.every}, weights {compare.weights(calm.stories)}"
    )
    kills = plan_kills(
        seed=settings.seed,
        count=settings.kills,
        nproc=settings.nproc,
        total_steps=pace.total_steps,
        epoch=pace.epoch,
        every=pace.every,
        signals=settings.signals,
        points=settings.points,
    )
    directory, records = _prepare(settings, "disturbed")
    slowest = max(_LEAST_HANG_SECONDS, _SLOWEST_STEPS * pace.step_seconds)
    job = _job(settings, directory, hang_seconds=slowest)
    disturbance = Disturbance(job, records, directory, pace, settings.patience, say)
    try:
        disturbance.run(kills)
    except ChaosError as error:
        raise ChaosError(f"{error}\n{job.tail()}") from None
    finally:
        job.end()
    result = Result(
        made=disturbance.made,
        launches=job.attempt,
        restarts=records.restarts(),
        pace=pace,
        calm=compare.sha256(calm.stories, calm.stories),
        wild=compare.sha256(records.stories, calm.stories),
        differences=compare.differences(calm.stories, records.stories),
    )
    say(f"disturbed:   {_summary(result)}, weights {compare.weights(records.stories)}")
    steps = ", ".join(map(str, result.went_on)) or "-"
    say(
        f"restarts:    {len(result.restarts)}, {len(result.went_on)} of which went on from a"
        f" snapshot, after step {steps}"
    )
    return result


def _summary(result: Result) -> str:
    texts = []
    for how in ("in place", "new launch", "went on", "finished"):
        made = [one for one in result.made if one.how == how]
        if made:
            median = statistics.median(one.seconds for one in made)
            texts.append(f"{len(made)} {how}" + (f" (median {median:.2f} s)" if median else ""))
    again = len(result.made) - sum(1 for one in result.made if one.how)
    texts += [f"{again} killed again before it was back"] * bool(again)
    return f"{len(result.made)} kills: {', '.join(texts)}"


def _prepare(settings: Settings, name: str) -> tuple[Path, Records]:
    directory = settings.directory / name
    directory.mkdir(parents=True)
    open_gate(directory / GATE, OPEN)
    return directory, Records(directory, settings.nproc)


def _job(settings: Settings, directory: Path, hang_seconds: float | None = None) -> Job:
    uid = f"chaos-{directory.name}-{secrets.token_hex(4)}"
    environment = environment_of_job(
        settings.environment, directory, uid, settings.every, hang_seconds
    )
    environment[CHAOS] = str(directory)
    return Job(settings.program, settings.nproc, environment, directory / "log")


def _calm(settings: Settings) -> tuple[Records, Pace]:
    """Run undisturbed, once. Raises ConfigError for a script that cannot be compared."""
    directory, records = _prepare(settings, "undisturbed")
    job = _job(settings, directory)
    began = time.monotonic()
    try:
        job.launch()
        while job.running():
            time.sleep(_LOOK_SECONDS)
            records.look()
            _check_directory(records, directory)
    finally:
        job.end()
    records.look()
    if job.exit_code != contract.ExitCode.SUCCESS:
        raise ChaosError(f"the undisturbed run failed with exit code {job.exit_code}\n{job.tail()}")
    for rank, story in enumerate(records.stories):
        if story.step and not story.hashes:
            raise ConfigError(
                f"rank {rank} left the loop after step {story.step}, and the script ended without"
                " run.finish(): whether training was over nobody knows. Call run.finish() after"
                " the loop"
            )
        if not story.hashes:
            raise ConfigError(
                "the script did not train with ddpjob_trainer.start() and run.steps() on every"
                " rank: chaos can only compare what the library records"
            )
    return records, _pace(records, began)


def _check_directory(records: Records, directory: Path) -> None:
    for story in records.stories:
        given = story.facts.get("directory", str(directory / "snapshots"))
        if given != str(directory / "snapshots"):
            raise ConfigError(
                f"the script keeps snapshots in {given}, because it gives start() a snapshot_dir:"
                " leave it out, or take it from the environment, so that chaos can choose one"
            )


def _pace(records: Records, began: float) -> Pace:
    story = records.stories[0]
    steps = max(1, len(story.losses))
    return Pace(
        total_steps=story.step,  # the script may end before the steps asked for
        epoch=story.epoch,
        every=int(story.facts["every"]),
        step_seconds=max(0.001, (story.last_at - story.progress_at) / steps),
        start_seconds=max(0.1, story.progress_at - began),
    )
