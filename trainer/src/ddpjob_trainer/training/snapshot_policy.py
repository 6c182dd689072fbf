"""Load the newest snapshot first; after each step compare ranks, save what is due.

The snapshot that ends the run says so: a resume has nothing left to train then, unless it asks for
more steps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ddpjob_contract.crd import AUTO
from ddpjob_trainer.comm.world import agree
from ddpjob_trainer.data.inputs import Indexed, Input
from ddpjob_trainer.errors import ConfigError, DivergedError
from ddpjob_trainer.gradients.replica_check import DivergenceCheck
from ddpjob_trainer.optim.update import begin_ema
from ddpjob_trainer.options import Options
from ddpjob_trainer.printing import say
from ddpjob_trainer.snapshot import weights
from ddpjob_trainer.training import run_config
from ddpjob_trainer.training.models.prepare import PreparedModels
from ddpjob_trainer.training.run_context import RunContext
from ddpjob_trainer.training.step_exchange import StepExchange

MODES = ("min", "max")

#: What was best so far, and its mode: a list, as a snapshot's JSON has it.
Best = list[Any]


class SnapshotPolicy:
    """One process's side of loading, comparing and saving. Every rank makes the same calls."""

    def __init__(
        self,
        process: RunContext,
        options: Options,
        trained: PreparedModels,
        source: Input,
        exchange: StepExchange,
    ) -> None:
        self.best: dict[str, Best] = {}  # by file, see run.keep_best()
        self.resumed_after = 0
        self.finished = False  # so the snapshot says
        self.rescued = False  # a survivor of a failure has made it
        self.other_data = True  # than it was made with, or there is none
        self._process = process
        self._manager = process.snapshots
        self._options = options
        self._trained = trained
        self._input = source
        self._exchange = exchange
        self._averaging = process.averaging
        self._divergence = DivergenceCheck(
            process.world, every=options.check_every, buffers=self._averaging.equal_buffers
        )
        self._config = run_config.fingerprint(
            process, options, source.order.epochs, source.fingerprint
        )
        units = trained.updater.units
        self._config["scheduler_every"] = [
            u.every or "step" for u in units if u.scheduler is not None
        ]

    # --- Resume -----------------------------------------------------------------------------

    def restore(self) -> None:
        """Load the newest snapshot into all there is. Raises ConfigError, as for another run's."""
        state, config = self._trained.state, self._config
        decides = config.copy()

        # All ranks must be in one run before any of them waits for a snapshot.
        facts = {name: config[name] for name in run_config.OF_ALL}
        on = self._manager.enabled
        facts |= {"snapshots": on, "snapshots.every": on and (self._manager.every or AUTO)}
        self._input.compare(agree(self._process.world, facts, self._input.own))
        self._manager.check(state)

        # Load; first note what the script has built, for loading overwrites it.
        built = run_config.Hyperparameters(self._trained)
        kept = self._averaging.kept
        self.resumed_after, stored = self._manager.restore(state, config, kept)

        # Say where the run differs from the one that made the snapshot.
        script = self._manager.hyperparameters == "script"
        self._say(built.compare(stored.get("hyperparameters"), script=script))
        config["hyperparameters"] = built.kept
        self._say(run_config.dataset_warning(stored, config["data"]))
        self._say(run_config.schedule_warning(stored, config))

        # Without a snapshot: begin with the weights that start(resume=...) names.
        if not stored and self._options.resume is not None:
            weights.load(Path(self._options.resume), state.module)
            self._say(f"beginning with the weights of {self._options.resume}")
        if (rescued := stored.get("rescued")) is not None:
            self.rescued = True
            who, step = rescued["rank"], self.resumed_after
            self._say(f"nothing is repeated: rank {who} saved step {step} before it was ended")
        self.other_data = stored.get("order") != config["order"]

        # Put back what is not in the state, and begin the averages.
        for module, ema in self._trained.updater.emas:
            begin_ema(module, ema)
        self.best = dict(stored.get("best", {}))
        self._trained.modes.put_back(stored.get("modes", {}))
        config["buckets"] = stored.get("buckets")

        # A finished run trains no more, unless more steps are asked for.
        self.finished = (self._options.total_steps or 0) <= stored.get("finished", -1)
        if self.finished:
            self._say(
                f"the run is finished, after step {self.resumed_after}: nothing is left to train."
                " The loop's body does not run, so names that only the body sets do not exist after"
                " it. To go on, ask for more steps than then; to train from the start, take another"
                " snapshot directory"
            )
        else:
            self._process.replay.begin(self.resumed_after, decides, stored.get("unproven"))

    def compare_samples(self) -> None:
        """Compare a few samples that all ranks have made. Every rank calls it."""
        if isinstance(self._input, Indexed) and self._process.world.size > 1:
            blob = json.dumps(self._input.compared).encode()
            gathered = self._process.world.gather_bytes("the comparison of samples", blob)
            self._say(self._input.compare_samples([json.loads(one) for one in gathered]))

    # --- After a step -----------------------------------------------------------------------

    def step_ended(self, done: int, *, last: bool, finished: bool) -> None:
        """Compare the ranks and make a snapshot, where it is time. Raises DivergedError."""
        due = self._manager.due(done, last=last)
        # One that will be skipped need not be compared.
        compare = self._divergence.due(done, needed=last or (due and self._manager.has_room))
        if due:
            self._process.replay.snapshot_due(self._trained.module)
        first = done == self.resumed_after + 1
        if first:  # by now it is known in which buckets gradients travel
            self._say(run_config.note_layout(self._config, self._averaging.layout()))
        # Before a snapshot can hold this step: a resume after it does not report the step again.
        self._exchange.report(all_steps=last or due or compare or first)
        # No snapshot of ranks that differ: a resume from it would hide the fault.
        if compare:
            self._compare(done)
            if due:
                trained = self._trained
                self._say(self._divergence.check_states(trained.optimizers(), trained.compared()))
        if due:
            self._process.replay.conclude()  # what differs marks this snapshot
            self._save(done, last=last, finished=finished)
        else:  # memory for the first snapshot, while there is time
            self._manager.prepare(self._trained.state)

    def left_early(self, done: int) -> None:
        """Keep for good that all ranks left the loop after this many steps.

        The script may have changed the weights since, each rank in its own way.
        """
        self._process.progress.plan(done)
        self._exchange.report(all_steps=True)
        if not self._manager.enabled or not done:
            return
        self._manager.wait_durable()
        if self._manager.made >= done:  # as of then: only the word is missing
            self._manager.mark({"finished": self._options.total_steps})
            return
        try:
            if self._divergence.due(done, needed=True):
                self._compare(done)
        except DivergedError as error:
            self._say(f"warning: the loop was left early, and this is no end to resume: {error}")
            return
        self._save(done, last=True, finished=True)

    def _compare(self, done: int) -> None:
        self._divergence.check(done, self._trained.module, self._trained.compared())

    def _save(self, done: int, *, last: bool, finished: bool) -> None:
        self._config |= {
            "best": dict(self.best),  # as of now: it is written later
            "modes": self._trained.modes.changed(),
            "finished": self._options.total_steps if finished else 0,
            "unproven": self._process.replay.mark(),
        }
        self._manager.save(done, self._trained.state, self._config, last=last)

    def facts(self) -> dict[str, Any]:
        """Return the configuration of a snapshot of a step in the midst of the run."""
        return {**self._config, "finished": 0, "unproven": self._process.replay.mark()}

    def _say(self, text: str) -> None:
        if text and self._process.world.rank == 0:
            say(0, text)


# --- run.keep_best() ---


def is_better(value: float, mode: str, before: Best | None) -> bool:
    """Tell whether a finite value beats what was best before. Raises ConfigError."""
    if mode not in MODES:
        raise ConfigError(f"keep_best(mode={mode!r}) must be one of {', '.join(MODES)}")
    best, its_mode = before or (math.inf if mode == "min" else -math.inf, mode)
    if mode != its_mode:
        raise ConfigError(
            f"keep_best(mode={mode!r}): for this file it was {its_mode!r} before; give another"
            " file, or the same mode"
        )
    return math.isfinite(value) and (value < best if mode == "min" else value > best)
