"""Weights & Biases and MLflow as sinks. Each is imported when it is asked for, in its thread.

Where their servers are, and which project or experiment it is, they read from their own
environment variables (WANDB_*, MLFLOW_*). Neither can take back a value, so what a resumed run
tells again is left out: it is what is there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: MLflow draws the ids of its runs itself: ours is found again by this tag.
RUN_TAG: Final = "ddpjob.run_id"


class WandB:
    """One W&B run per run of ours, however often it was killed."""

    def __init__(self) -> None:
        self._run: Any = None
        self._own = False
        self._next = 0  # the first step that W&B has not

    def open(self, run_id: str, step: int) -> None:
        """Go on with the run of this id, or begin it; one that the script has begun is used."""
        import wandb

        self._own = wandb.run is None
        # Its console capture would put itself between our streams and the launcher.
        settings = wandb.Settings(console="off")
        self._run = wandb.run or wandb.init(id=run_id, resume="allow", settings=settings)
        self._next = int(self._run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """W&B takes steps in rising order only."""
        if step >= self._next:
            self._run.log(dict(values), step=step)
            self._next = step

    def close(self) -> None:
        """Upload what is left; a run that the script has begun stays open."""
        if self._own and self._run is not None:
            self._run.finish()


class MLflow:
    """One MLflow run per run of ours, however often it was killed."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._resumed = False
        self._last: dict[str, int] = {}  # by name: the newest step that an earlier process told

    def open(self, run_id: str, step: int) -> None:
        """Go on with the run that has our tag, or begin it, in the active experiment."""
        import mlflow

        wanted = f"tags.`{RUN_TAG}` = '{run_id}'"
        found = mlflow.search_runs(filter_string=wanted, max_results=1, output_format="list")
        self._resumed = bool(found)
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.start_run(tags={RUN_TAG: run_id})
        self._client = mlflow.MlflowClient()
        self._run = mlflow.active_run().info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All values of a step in one request."""
        import mlflow

        new = {name: value for name, value in values.items() if step > self._known(name)}
        if new:
            mlflow.log_metrics(new, step=step)

    def _known(self, name: str) -> int:
        if self._resumed and name not in self._last:
            told = self._client.get_metric_history(self._run, name)
            self._last[name] = max((metric.step for metric in told), default=-1)
        return self._last.get(name, -1)

    def close(self) -> None:
        """The run has ended."""
        import mlflow

        mlflow.end_run()
