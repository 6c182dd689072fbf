"""Put a verdict of audit into words: what was done, what differs, its cause and its cure. Pure.

A cause has one of eight cures, in the words of the framework that the script uses. A new kind of
finding gets its words here and its row in docs/start/audit.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ddpjob_contract.resume import shown_words
from ddpjob_tools.prove.cause import RIGHT, ROUNDING, UNKNOWN, WRONG, Finding, Verdict
from ddpjob_tools.prove.record import Gang
from ddpjob_tools.prove.samples import named

#: What is compared, as a user calls it.
_TITLES: Final = {
    "weights": "weights before the step",
    "buffers": "buffers, frozen weights",
    "state": "optimizer's state",
    "hyper": "optimizer's settings (lr)",
    "inputs": "samples",
    "outputs": "results, loss",
    "gradients": "gradients",
    "after": "weights after the step",
    "rng": "random numbers",
}
#: Whose words are taken where a script imports several: of the outermost.
_FRAMEWORKS: Final = (
    "ddpjob_trainer", "lightning", "pytorch_lightning", "transformers", "accelerate",
)  # fmt: skip
OWN: Final = "own loop"

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
    "ddpjob_trainer": "leave Snapshots.directory to the environment, or give all starts one",
}
_MODEL: Final = {
    OWN: "save model.state_dict(), which has the buffers, not model.parameters(), and that of every"
    " other model, such as a teacher; load it with strict=True after the model is built and before"
    " the optimizer is; write to a new file, then os.replace(), so that none is half written",
}
_OPTIMIZER: Final = {
    OWN: "save optimizer.state_dict() and scheduler.state_dict() with the model's; make both, for"
    " the same parameters in the same order, before either is loaded: a new scheduler sets lr",
    "lightning": "save_weights_only=False, and trainer.fit(ckpt_path=...) instead of"
    " load_from_checkpoint(), which loads weights only; return the scheduler from"
    " configure_optimizers(), which Lightning then saves",
    "accelerate": "accelerator.load_state() after prepare(model, optimizer, scheduler, ...): it"
    " loads what was prepared, or given to accelerator.register_for_checkpointing()",
    "transformers": "save_only_model=False, and trainer.train(resume_from_checkpoint=...) instead"
    " of from_pretrained(checkpoint), which loads weights only; the same max_steps, warmup and"
    " epochs at each start",
}
_SAMPLES: Final = {
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
_RANDOM: Final = {
    OWN: "save torch.get_rng_state(), torch.cuda.get_rng_state_all(), random.getstate(),"
    " numpy.random.get_state() of each rank, and put them back just before the first step or draw;"
    " or seed each epoch by its number (a sampler: sampler.set_epoch(epoch))",
    "lightning": "Lightning keeps no random states: put them into on_save_checkpoint() and back in"
    " on_train_batch_start() of the first batch",
    "accelerate": "load_state() puts them back, but skipping batches may draw from them: put them"
    " back after that, or seed each epoch",
    "transformers": "its rng_state*.pth is put back after batches are skipped: all ranks need"
    " theirs in the checkpoint's folder",
}
_KEPT: Final = {
    OWN: "save and load what the script keeps beside model and optimizer: the step (or epoch and"
    " position) from which it counts, averages, generators of its loaders and transforms, memory"
    " banks",
}
_OUTPUT: Final = {
    OWN: "see the end of its output below, and start the script by hand from a checkpoint; where it"
    " waits for data that it has skipped, or for another process, --patience SECONDS allows more",
}
_NONE: Final = {
    OWN: "nothing, unless equal bits are wanted: then this project's library, whose sums do not"
    " depend on a restart",
}
_CURES: Final[Mapping[str, Mapping[str, str]]] = {
    "nothing-loaded": _CHECKPOINT, "nothing-kept": _CHECKPOINT, "no-step": _CHECKPOINT,
    "weights": _MODEL, "buffers": _MODEL, "state": _OPTIMIZER, "hyper": _OPTIMIZER,
    "inputs": _SAMPLES, "seed": {**_SAMPLES, OWN: _RANDOM[OWN]}, "rng": _RANDOM,
    "between": _KEPT, "unseen": _KEPT, "length": _KEPT, "crash": _OUTPUT, "hang": _OUTPUT,
    "rounding": _NONE,
}  # fmt: skip
#: Seven of ten known programs load only then.
_ARGUED: Final = "; where an argument says that it loads: --resume-args, of audit and of run"
_TORN: Final = (
    "; a checkpoint that is half written at the kill must not be taken: write to a new file, then"
    " os.replace()"
)
_LIBRARY: Final = (
    "All of this comes by itself with ddpjob's library (ddp.start(), run.prepare(), run.steps()):"
    " docs/guides/training.md"
)


def framework(found: Mapping[str, str]) -> str:
    """Return the framework that resumes: of several the outermost."""
    return next((name for name in _FRAMEWORKS if name in found), OWN)


def cure(finding: Finding, framework: str) -> str:
    """Return what to do, in the framework's words where it has some."""
    facts = finding.facts
    rows = _CURES["seed" if facts.get("seed") else finding.kind]
    name = "lightning" if framework == "pytorch_lightning" else framework
    more = _ARGUED if finding.kind == "nothing-loaded" else _TORN if facts.get("torn") else ""
    return rows.get(name, rows[OWN]) + more


# --- What was found -----------------------------------------------------------------------

_ROUNDING: Final = (
    "gradients differ by rounding only, from the same weights, samples and random numbers: "
)
#: By kind of finding, or by what its facts make of it: see _form().
_SAID: Final[Mapping[str, str]] = {
    "nothing-loaded": "nothing was loaded, though files were written: training starts over from"
    " step 1",
    "nothing-kept": "nothing was kept: no file that can be a checkpoint was written before the"
    " kill, and training starts over from step 1",
    "weights": "of {count} weights {equal} are those after step {after}, others are not: {names}",
    "no-weight": "the weights loaded are those of no step: not the saved ones, or changed on the"
    " way (another dtype, an average, one saved while a step was under way)",
    "between": "equal weights after the step before were changed otherwise before this one (an"
    " average that was swapped in, clipping)",
    "buffers": "buffers or frozen weights (BatchNorm's averages, or another model, such as a"
    " teacher or a moving average) are not those of this step",
    "state": "the optimizer's state was loaded in part, or changed: it is not that of this step",
    "no-state": "the optimizer's state (momentum, Adam's averages) was not loaded: it starts empty",
    "hyper": "the optimizer's settings differ: {settings}",
    "begins": "epoch {epoch} begins again: the samples of its first {count} steps are trained a"
    " second time",
    "repeated": "the samples of step {step} come again: {count} steps{where} are repeated",
    "skipped": "the samples of step {step} come at once: {count} steps{where} are left out",
    "earlier": "the samples are those of step {step}{there} instead of {here}",
    "later": "the samples are those of step {step}{there} instead of {here}",
    "shuffled": "the samples come in another order: of the {count} until the end{where}, {again}"
    " are trained a second time and {missing} never",
    "seed": "the samples are those of step {step}, drawn from random numbers that begin again from"
    " the seed at each start",
    "drawn": "the inputs are none of the undisturbed run's; random numbers differ too, so they may"
    " be drawn (augmentation, noise)",
    "unknown": "the inputs are none of the undisturbed run's",
    "rounding": _ROUNDING + "kernels or threads add up in another order",
    "buckets": _ROUNDING + "after a restart DistributedDataParallel packs its buckets in another"
    " order, and with {world} processes sums are rounded otherwise",
    "rng": "random numbers differ (dropout, noise): the generators' states were not put back",
    "unseen": "{what} differ from equal weights, samples and random numbers: something that this"
    " audit does not see (a generator or hidden state of the script, a gradient that was kept"
    " between steps)",
    "length": "training ended after step {ended}, undisturbed after step {total}",
    "crash": "started again, it failed with exit code {code}",
    "hang": "started again, it made no further step, and did not end",
    "no-step": "started again, it ended without a step, as if training had been complete",
}


def said(finding: Finding) -> str:
    """Describe a finding in one or two sentences."""
    facts = finding.facts
    epoch, from_, other = facts.get("epoch"), facts.get("from"), facts.get("other", ())
    settings = [f"{name} {_short(its)} instead of {_short(mine)}" for name, mine, its in
                facts.get("changed", ())]  # fmt: skip
    return _SAID[_form(finding.kind, facts)].format(
        **facts,
        names=named(other),
        equal=facts.get("count", 0) - len(other),
        settings=", ".join(settings) or "another number of groups",
        where=f" of epoch {epoch}" if epoch else "",
        here=f"epoch {epoch}" if epoch else "this step",
        there=f", which is in epoch {from_}," if from_ else "",
    )


def _form(kind: str, facts: Mapping[str, Any]) -> str:
    if kind == "inputs":
        drawn = facts["place"] == "unknown" and facts["rng"]
        return "seed" if facts["seed"] else "drawn" if drawn else str(facts["place"])
    if kind == "weights" and len(facts["other"]) == facts["count"]:
        return "no-weight"
    if kind == "state" and facts["empty"]:
        return "no-state"
    return "buckets" if kind == "rounding" and facts["world"] > 2 else kind


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- The whole report ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict and what it rests on. ``tail``: the last output of a run that failed."""

    verdict: Verdict
    undisturbed: Gang
    saved: tuple[int, ...]
    epoch: int | None
    tail: str = ""
    resume_arguments: tuple[str, ...] = ()
    resume_when: str = ""


def text(result: Result, script: str) -> str:
    """Return the report for a stranger: what was done, the verdict, what differs, the cure."""
    verdict, head = result.verdict, result.undisturbed[0]
    versions = ", ".join(f"{name} {version}".strip() for name, version in head.frameworks.items())
    processes = f"{len(result.undisturbed)} process" + ("es" if len(result.undisturbed) > 1 else "")
    ours = framework(head.frameworks)
    right = verdict.label in (RIGHT, ROUNDING)
    paragraphs = [
        f"{script}: {versions or OWN}, {processes}",
        "\n".join(_story(result)),
        _headline(verdict),
        *(f"  {_where(one, result)}{said(one)}\n    cure: {cure(one, ours)}"
          for one in verdict.findings),
        f"  {_LIBRARY}" if verdict.label == WRONG and ours != "ddpjob_trainer" else "",
        f"  {_with(result)}" if result.resume_arguments and right else "",
        *(f"  {note}" for note in _notes(result.undisturbed)),
        not_repeated(verdict),
        "\n".join(_table(verdict)) if verdict.since else "",
        result.tail and f"  the end of its output when it was started again:\n{result.tail}",
    ]  # fmt: skip
    return "\n\n".join(filter(None, paragraphs))


def _story(result: Result) -> Iterator[str]:
    verdict, epoch, steps = result.verdict, result.epoch, result.undisturbed[0].steps
    an_epoch = f", {epoch} in an epoch" if epoch else ""
    kept = f"files written after step {_numbers(result.saved)}"
    kept = kept if result.saved else "no file that can be a checkpoint"
    yield f"  undisturbed    {verdict.total} steps{an_epoch}; {kept}"
    if steps and not steps[0].empty:
        yield "                 it began from a checkpoint in this folder (--leave-out NAME)"
    killed, after = verdict.killed_after, verdict.resumed_after
    yield f"  killed         after step {killed}" + (
        f", in epoch {(killed - 1) // epoch + 1}" if epoch else ""
    )
    if given := result.resume_arguments:
        yield f"  with           {shown_words(given)}, at each start but the first"
    if after is None:
        where = "with the state of no step that it had made"
    elif verdict.unclear:
        where = "after an unknown step: several have the same weights"
    elif after == 0:
        where = "at the beginning: all steps done again"
    elif lost := killed - after:
        where = f"after step {after}, {lost} step{'s' * (lost != 1)} done again"
    else:
        where = f"after step {after}, no step lost"
    yield f"  started again  {where}"


def _numbers(steps: Sequence[int]) -> str:
    shown = [*map(str, steps)]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:3], f"... {shown[-1]}"])


def _headline(verdict: Verdict) -> str:
    if verdict.label == RIGHT:
        final = ", and ends in the same weights" if verdict.final else ""
        after = f"each of the {verdict.compared} steps after the restart"
        return f"RIGHT: {after} is as undisturbed, bit for bit{final}"
    if verdict.label == ROUNDING:
        return (
            "RIGHT, but for rounding: all that was loaded, and every sample after it, is as"
            " undisturbed; sums are not"
        )
    if verdict.label == UNKNOWN:
        return (
            "NOT TO BE JUDGED: nothing wrong was found up to the kill, but even undisturbed the"
            " script does not repeat itself"
        )
    first = verdict.findings[0]
    if first.kind.startswith("nothing"):
        same = "other ones" if any(verdict.since.values()) else "ends in the same weights"
        end = f", and {same}" if verdict.since else ""
        return (
            "WRONG: a kill loses all that was trained. Started again, it does all steps again" + end
        )
    since = f". It differs from step {first.step} on" if first.step else ""
    return f"WRONG: a killed run does not end as an undisturbed one{since}"


def _where(finding: Finding, result: Result) -> str:
    if not finding.step:
        return ""
    everywhere = len(finding.ranks) in (0, len(result.undisturbed))
    ranks = "" if everywhere else f", rank {', '.join(map(str, finding.ranks))}"
    return f"step {finding.step}{ranks}: "


def _with(result: Result) -> str:
    """Say what the verdict hangs on, and how a cluster does the same."""
    words = f"--resume-args {shlex.quote(shown_words(result.resume_arguments))}"
    if result.resume_when:
        words += f" --resume-when {shlex.quote(result.resume_when)}"
    return (
        f"This holds with {words}: give them to ddpjob-trainer run and ddpjob init, too"
        " (spec.restart of a DDPJob), or a restart begins at step 1"
    )


def _notes(undisturbed: Gang) -> Iterator[str]:
    """Say what a run of several processes shows that do not train one model."""
    if len({story.steps[0].after for story in undisturbed if story.steps}) > 1:
        yield (
            "the ranks' weights differ after step 1: without DistributedDataParallel each trains by"
            " itself (of a model that is sharded they differ rightly)"
        )
    if all(step.after == step.weights for story in undisturbed for step in story.steps):
        yield "the weights never change: equal ones prove nothing here"


def not_repeated(verdict: Verdict) -> str:
    """Say which first difference two undisturbed runs have, and its cure; "" for none."""
    for one in verdict.not_repeated:
        if one.facts["root"]:
            return (
                f"  not repeated: even undisturbed, {_TITLES[one.facts['what']]} differ from step"
                f" {one.step} on\n    cure: seed all that is drawn at the script's head"
                " (torch.manual_seed(SEED), random.seed(SEED), numpy.random.seed(SEED)), or give"
                " --seed 1; results and gradients that differ all the same: kernels or threads add"
                " up in another order (torch.use_deterministic_algorithms(True))"
            )
    return ""


def _table(verdict: Verdict) -> Iterator[str]:
    begin = verdict.resumed_after or 0
    yield f"  compared, steps {begin + 1} to {begin + verdict.compared}:"
    varying = {one.facts["what"] for one in verdict.not_repeated}
    for what, title in _TITLES.items():
        step = verdict.since[what]
        text = f"differ from step {step} on" if step else "equal"
        if what == "rng" and step and verdict.label in (RIGHT, ROUNDING):
            text += ", without effect"
        if what in varying:
            text += " (not repeated by the script itself, so compared up to the kill)"
        yield f"    {title:<27}{text}"
    if verdict.final is not None:
        yield f"    {'weights at the end':<27}{'equal' if verdict.final else 'differ'}"


def as_json(result: Result) -> dict[str, Any]:
    """Return the result for machines."""
    head, verdict = result.undisturbed[0], result.verdict
    ours = framework(head.frameworks)
    return {
        "verdict": verdict.label,
        "framework": ours,
        "versions": {"torch": head.torch, **head.frameworks},
        "processes": len(result.undisturbed),
        "total_steps": verdict.total,
        "epoch_steps": result.epoch,
        "saved_after": list(result.saved),
        "killed_after": verdict.killed_after,
        "resumed_after": verdict.resumed_after,
        "final_weights_equal": verdict.final,
        "resume_args": list(result.resume_arguments),
        "resume_when": result.resume_when,
        "notes": list(_notes(result.undisturbed)),
        "first_difference": verdict.since,
        "findings": [
            {**asdict(one), "said": said(one), "cure": cure(one, ours)} for one in verdict.findings
        ],
        "not_repeated": [asdict(one) for one in verdict.not_repeated],
    }
