"""Say in words what a finding is, and its cure in the framework's own words. report.py prints both.

Pure: a table. A new kind of finding gets its row here and in docs/start/audit.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ddpjob_tools.prove.cause import Finding, Verdict
from ddpjob_tools.prove.samples import named

#: Whose words are taken where a script imports several.
_FIRST: Final = (
    "ddpjob_trainer", "lightning", "pytorch_lightning", "transformers", "accelerate",
)  # fmt: skip
OWN: Final = "own loop"


def framework(found: Mapping[str, str]) -> str:
    """Return the framework that resumes: of several the outermost."""
    return next((name for name in _FIRST if name in found), OWN)


def said(finding: Finding) -> str:
    """Describe a finding in one or two sentences."""
    return _SAID[finding.kind](finding.facts)


def _weights(facts: Mapping[str, Any]) -> str:
    other, count = facts["other"], facts["count"]
    if len(other) == count or not count:
        return (
            "the weights loaded are those of no step: not the saved ones, or changed on the way"
            " (another dtype, an average, one saved while a step was under way)"
        )
    return (
        f"of {count} weights {count - len(other)} are those after step {facts['after']}, others are"
        f" not: {named(other)}"
    )


def _state(facts: Mapping[str, Any]) -> str:
    if facts["empty"]:
        return "the optimizer's state (momentum, Adam's averages) was not loaded: it starts empty"
    return "the optimizer's state was loaded in part, or changed: it is not that of this step"


def _hyper(facts: Mapping[str, Any]) -> str:
    shown = [f"{name} {_short(other)} instead of {_short(one)}" for name, one, other in
             facts["changed"]]  # fmt: skip
    return f"the optimizer's settings differ: {', '.join(shown) or 'another number of groups'}"


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _inputs(facts: Mapping[str, Any]) -> str:
    kind, step, count = facts["place"], facts["step"], facts["count"]
    if facts.get("seed"):
        return (
            f"the samples are those of step {step}, drawn from random numbers that begin again from"
            " the seed at each start"
        )
    epoch = f"epoch {facts['epoch']}" if facts["epoch"] else ""
    where = f" of {epoch}" if epoch else ""
    if kind == "begins":
        return (
            f"epoch {facts['epoch']} begins again: the samples of its first {count} steps are"
            " trained a second time"
        )
    if kind == "repeated":
        return f"the samples of step {step} come again: {count} steps{where} are repeated"
    if kind == "skipped":
        return f"the samples of step {step} come at once: {count} steps{where} are left out"
    if kind in ("earlier", "later"):
        of = f", which is in epoch {facts['from']}," if facts["from"] else ""
        return f"the samples are those of step {step}{of} instead of {epoch or 'this step'}"
    if kind == "shuffled":
        return (
            f"the samples come in another order: of the {count} until the end{where or ' of it'},"
            f" {facts['again']} are trained a second time and {facts['missing']} never"
        )
    drawn = "; random numbers differ too, so they may be drawn (augmentation, noise)"
    return "the inputs are none of the undisturbed run's" + (drawn if facts["rng"] else "")


def _rounding(facts: Mapping[str, Any]) -> str:
    text = "gradients differ by rounding only, from the same weights, samples and random numbers"
    if facts["world"] > 2:
        return (
            f"{text}: after a restart DistributedDataParallel packs its buckets in another order,"
            f" and with {facts['world']} processes sums are rounded otherwise"
        )
    return f"{text}: kernels or threads add up in another order"


def _length(facts: Mapping[str, Any]) -> str:
    return f"training ended after step {facts['ended']}, undisturbed after step {facts['total']}"


_SAID: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "nothing-loaded": lambda facts: (
        "nothing was loaded, though files were written: training starts over from step 1"
    ),
    "nothing-kept": lambda facts: (
        "nothing was kept: no file that can be a checkpoint was written before the kill, and"
        " training starts over from step 1"
    ),
    "weights": _weights,
    "between": lambda facts: (
        "equal weights after the step before were changed otherwise before this one (an average"
        " that was swapped in, clipping)"
    ),
    "buffers": lambda facts: (
        "buffers or frozen weights (BatchNorm's averages, or another model, such as a teacher or"
        " a moving average) are not those of this step"
    ),
    "state": _state,
    "hyper": _hyper,
    "inputs": _inputs,
    "rounding": _rounding,
    "rng": lambda facts: (
        "random numbers differ (dropout, noise): the generators' states were not put back"
        + (" on these ranks" if facts["world"] > 1 else "")
    ),
    "unseen": lambda facts: (
        f"{facts['what']} differ from equal weights, samples and random numbers: something that"
        " this audit does not see (a generator or hidden state of the script, a gradient that was"
        " kept between steps)"
    ),
    "length": _length,
    "crash": lambda facts: f"started again, it failed with exit code {facts['code']}",
    "hang": lambda facts: "started again, it made no further step, and did not end",
    "no-step": lambda facts: (
        "started again, it ended without a step, as if training had been complete"
    ),
}

_CHECKPOINT: Final = {
    OWN: "every so many steps save model.state_dict(), optimizer.state_dict(), the scheduler's,"
    " random states, epoch and position into a new file, os.replace() it over the last one, and"
    " load it at the start if it exists",
    "lightning": "ModelCheckpoint(every_n_train_steps=N, save_last=True) and trainer.fit(...,"
    ' ckpt_path="last")',
    "accelerate": "accelerator.save_state(DIR) every so many steps, accelerator.load_state(DIR) at"
    " the start if DIR exists",
    "transformers": "TrainingArguments(save_steps=N) and"
    " trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir)); True fails where there"
    " is none yet",
    "ddpjob_trainer": "leave snapshot_dir to the environment, or name one directory for all starts",
}
_DATA: Final = {
    OWN: "save epoch and position; call sampler.set_epoch(epoch), or seed the shuffle from the"
    " epoch, then skip the batches that were trained, and restore random states after that",
    "lightning": "a sampler whose order is a function of (seed, epoch), and torchdata's"
    " StatefulDataLoader, whose state Lightning keeps in its checkpoints; a plain DataLoader begins"
    " the epoch with another order",
    "accelerate": "accelerate 1.15 or newer (older ones take the first epoch's order,"
    " accelerate#4071), with DataLoaderConfiguration(use_seedable_sampler=True), then"
    " loader.set_epoch(epoch) and skip_first_batches(loader, done) for the rest of that epoch; or"
    " use_stateful_dataloader=True",
    "transformers": "transformers 5 or newer with accelerate 1.15 or newer (older ones take the"
    " first epoch's order, transformers#40691), ignore_data_skip=False, a fixed data_seed",
    "ddpjob_trainer": "take batches from run.steps(); an own DataLoader needs run.register(...)",
}
_STATES: Final = (
    "save torch.get_rng_state(), torch.cuda.get_rng_state_all(), random.getstate(),"
    " numpy.random.get_state() of each rank, and put them back just before the first"
)
_CURES: Final[Mapping[str, Mapping[str, str]]] = {
    "nothing-loaded": _CHECKPOINT,
    "nothing-kept": _CHECKPOINT,
    "weights": {
        OWN: "load_state_dict(..., strict=True) of all of the model, after it is built and before"
        " the optimizer is; write to a new file, then os.replace(), so that none is half written",
    },
    "between": {OWN: "save and load what changes weights between steps, such as averages"},
    "buffers": {
        OWN: "save model.state_dict(), which has the buffers, not model.parameters(), and that of"
        " every other model, such as a teacher",
    },
    "state": {
        OWN: "save optimizer.state_dict() with the model's, and load it after the optimizer is made"
        " for the same parameters in the same order",
        "lightning": "save_weights_only=False, and trainer.fit(ckpt_path=...) instead of"
        " load_from_checkpoint(), which loads weights only",
        "accelerate": "accelerator.load_state() after prepare(model, optimizer, ...): it loads what"
        " was prepared",
        "transformers": "save_only_model=False, and trainer.train(resume_from_checkpoint=...)"
        " instead of from_pretrained(checkpoint), which loads weights only",
    },
    "hyper": {
        OWN: "save scheduler.state_dict() and load it after the scheduler is made; make both before"
        " optimizer.load_state_dict(), as a new scheduler sets lr",
        "lightning": "return the scheduler from configure_optimizers(), which Lightning then saves",
        "accelerate": "prepare() the scheduler too, or accelerator.register_for_checkpointing(it)",
        "transformers": "the same max_steps, warmup and epochs at each start;"
        " save_only_model=False",
    },
    "inputs": _DATA,
    "seed": {
        **_DATA,
        OWN: f"{_STATES} draw; or seed each epoch by its number; an order that a sampler"
        " draws comes from sampler.set_epoch(epoch)",
    },
    "rounding": {
        OWN: "nothing, unless equal bits are wanted: then this project's library, whose sums do not"
        " depend on a restart",
    },
    "rng": {
        OWN: f"{_STATES} step",
        "lightning": "Lightning keeps no random states: put them into on_save_checkpoint() and back"
        " in on_train_batch_start() of the first batch",
        "accelerate": "load_state() puts them back, but skipping batches may draw from them: put"
        " them back after that, or seed each epoch",
        "transformers": "its rng_state*.pth is put back after batches are skipped: all ranks need"
        " theirs in the checkpoint's folder",
    },
    "unseen": {
        OWN: "save and load what the script keeps beside model and optimizer: generators of its"
        " loaders and transforms, memory banks, averages, counters",
    },
    "length": {OWN: "save the step (or epoch and position), and count from it"},
    "crash": {
        OWN: "see the end of its output below, and start the script by hand from a checkpoint",
    },
    "torn": {
        OWN: "see the end of its output below; a checkpoint that is half written at the kill must"
        " not be taken: write to a new file, then os.replace()",
    },
    "hang": {
        OWN: "see the end of its output below: perhaps it waits for data that it has skipped, or"
        " for another process; --patience SECONDS allows more",
    },
    "no-step": _CHECKPOINT,
}  # fmt: skip

#: Seven of ten known programs load only then.
_ARGUED: Final = "; where an argument says that it loads: --resume-args, of audit and of run"
#: A fact of a finding -> the row that fits better than its kind's.
_SPECIAL: Final = (("torn", "torn"), ("seed", "seed"))

LIBRARY: Final = (
    "All of this comes by itself with ddpjob's library (ddp.start(), run.prepare(), run.steps()):"
    " docs/guides/training.md"
)

#: What a script does not repeat even undisturbed: the cure.
_CHANCE: Final = {
    "weights": "weights are made without a seed: torch.manual_seed(SEED) before the model",
    "buffers": "buffers are made without a seed: torch.manual_seed(SEED) before the model",
    "inputs": "samples come in another order, or are drawn, each time: torch.manual_seed(SEED),"
    " random.seed(SEED), numpy.random.seed(SEED) before the loader, or a generator with a seed",
    "outputs": "results differ from equal weights and inputs: dropout without a seed"
    " (torch.manual_seed), or kernels in another order (torch.use_deterministic_algorithms(True))",
    "gradients": "gradients differ from equal results: kernels or threads add up in another order"
    " (torch.use_deterministic_algorithms(True))",
    "hyper": "the optimizer's settings depend on chance or time",
}  # fmt: skip


def cure(finding: Finding, framework: str) -> str:
    """Return what to do, in the framework's words where it has some."""
    kind = next((one for one, fact in _SPECIAL if finding.facts.get(fact)), finding.kind)
    rows = _CURES[kind]
    argued = _ARGUED if kind == "nothing-loaded" else ""
    name = "lightning" if framework == "pytorch_lightning" else framework
    return rows.get(name, rows.get(OWN, "")) + argued


def chance(verdict: Verdict) -> str:
    """Say which first difference two undisturbed runs have, and its cure; "" for none."""
    roots = [one for one in verdict.loose if one.facts["root"]]
    if not roots:
        return ""
    one = roots[0]
    what = one.facts["what"]
    text = _CHANCE.get(what, f"{what} differ by chance")
    return f"from step {one.step} on even an undisturbed run is not repeated: {text}"
