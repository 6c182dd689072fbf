"""Reckon a gang's goodput from numbers, without a cluster: `kubectl ddp plan`."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kubectl_ddp.failure import Failure
from kubectl_ddp.kubectl import Kubectl
from kubectl_ddp.planning import formulas, text
from kubectl_ddp.planning.compare import Plan, What, plan
from kubectl_ddp.planning.parts import DAY, DETECTION, KINDS, LLAMA3, LLAMA3_GPU_MTBF, Parts

EXAMPLES = """examples:
  kubectl ddp plan --gpus 512 --step-seconds 1.2s --snapshot-stall 150ms
  kubectl ddp plan --gpus 8,64,512,4096,32768,100000
  kubectl ddp plan --gpus 4096 --node-mtbf 90d --detection hang=1m,node=25s --capacity-wait 10m
  kubectl ddp plan --gpus 64 --every-steps 500 --restart all --json

Times are 250ms, 30s, 5m, 2h, 40d, also 1h30m; a number alone is seconds. What the model leaves
out: docs/guides/planning.md."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY, "": 1.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_MOST_SECONDS = 36500 * DAY
_MOST_GPUS = 10**8
_MOST_STEPS = 10**9
_MOST_SIZES = 20
#: --restart -> Parts.in_place, Parts.alone.
_RESTARTS = {"least": (True, True), "in-place": (True, False), "all": (False, False)}
_DEFAULT = Parts()


def arguments(one: argparse.ArgumentParser) -> None:
    """Add the options: cli.py calls it. run() reads their words, so that an error is one line."""
    one.epilog, one.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter

    def add(name: str, metavar: str, default: str, words: str) -> None:
        shown = f"{words} (default: {default.replace('%', '%%')})"
        one.add_argument(name, metavar=metavar, default=default, help=shown)

    one.add_argument("--gpus", metavar="N", help="of the gang; with commas a row for each size")
    add("--gpus-per-node", "N", "8", "one pod has them all")
    add("--standby", "PODS", "0", "spec.standby: pods that idle until one is lost")
    one.add_argument(
        "--node-mtbf", metavar="TIME", help="mean time between failures of a node, all kinds"
        " together (default: 2112d / GPUs per node, Llama 3's of 16,384 H100)",
    )  # fmt: skip
    add("--shares", "KIND=N,...", _words(LLAMA3), "of each kind of failure")
    add("--announced", "SHARE", "0%", "of lost nodes are known beforehand and handed over")
    add("--detection", "KIND=TIME,...", _times(DETECTION), "until noticed; hub: replica 0's node")
    add("--restart", "WHAT", "least", "least, in-place (no lost pod alone) or all (pods, always)")
    seconds = {
        "--teardown": ("teardown", "until what is left of pods that are replaced is gone"),
        "--capacity-wait": ("wait", "until there is room for a new pod"),
        "--start": ("start", "of a pod: schedule, pull the image, start the container"),
        "--start-per-pod": ("start_per_pod", "more for each pod where all start"),
        "--warmup": ("warmup", "of a new pod until its first step: import, compile, load"),
        "--warmup-spare": ("warmup_spare", "the same in place, or in a standby"),
        "--step-seconds": ("step", "a step, with its wait for input"),
        "--data-wait": ("data", "the part of a step that waits for input"),
        "--snapshot-stall": ("stall", "training stands still for a snapshot"),
        "--snapshot-write": ("write", "in the background until a snapshot is durable"),
    }
    for name, (part, words) in seconds.items():
        add(name, "TIME", text.short(getattr(_DEFAULT, part)), words)
    add("--every-steps", "N", "auto", "spec.snapshot: steps between snapshots; auto: the best")
    add("--faster", "TIME", "20s", "of the option that notices each failure in this time")
    add("--period", "TIME", "30d", "a run that is simulated")
    add("--seed", "N", "1", "other failures")
    one.add_argument("--json", action="store_true", help="for programs; several sizes: a list")


def run(_: Kubectl, options: argparse.Namespace) -> int:
    """Print the plan, or a row for each size; raises Failure."""
    if options.gpus is None:
        raise Failure("say how many GPUs the gang has: --gpus 512, or several: --gpus 64,512,4096")
    sizes = [_whole("--gpus", size, 1, _MOST_GPUS) for size in options.gpus.split(",")]
    if len(sizes) > _MOST_SIZES:
        raise Failure(f"--gpus has {len(sizes)} sizes: give {_MOST_SIZES} at most")
    what = What(
        faster=_time("--faster", options.faster),
        seconds=_time("--period", options.period, least=60.0),
        seed=_whole("--seed", options.seed, 0, 2**63),
    )
    gangs = [parts(size, options) for size in sizes]
    names = frozenset(text.SWEPT) if len(gangs) > 1 else None
    plans = [plan(gang, what, names) for gang in gangs]
    print("\n".join(_shown(plans, as_json=options.json)))
    return 0


def _shown(plans: list[Plan], *, as_json: bool) -> list[str]:
    if as_json:
        found = [text.facts(one) for one in plans]
        return [json.dumps(found if len(found) > 1 else found[0], indent=2)]
    return text.tables(plans[0]) if len(plans) == 1 else text.sweep(plans)


def parts(gpus: int, options: argparse.Namespace) -> Parts:
    """Read the gang's numbers; raises Failure."""
    per_node = _per_node(gpus, options)
    mtbf = LLAMA3_GPU_MTBF / per_node
    if options.node_mtbf is not None:
        mtbf = _time("--node-mtbf", options.node_mtbf, least=0.001)
    if options.restart not in _RESTARTS:
        raise Failure(f"--restart {options.restart}: it is one of {', '.join(_RESTARTS)}")

    def seconds(option: str, least: float = 0.0) -> float:
        return _time(f"--{option}", getattr(options, option.replace("-", "_")), least=least)

    in_place, alone = _RESTARTS[options.restart]
    found = Parts(
        pods=gpus // per_node,
        gpus_per_pod=per_node,
        standby=_whole("--standby", options.standby, 0, _MOST_GPUS),
        node_mtbf=mtbf,
        shares=_pairs("--shares", options.shares, KINDS, {}, _number),
        announced=_share("--announced", options.announced),
        detection=_pairs("--detection", options.detection, DETECTION, DETECTION, _time),
        in_place=in_place,
        alone=alone,
        teardown=seconds("teardown"),
        wait=seconds("capacity-wait"),
        start=seconds("start"),
        start_per_pod=seconds("start-per-pod"),
        warmup=seconds("warmup"),
        warmup_spare=seconds("warmup-spare"),
        step=seconds("step-seconds", least=1e-6),
        data=seconds("data-wait"),
        stall=seconds("snapshot-stall"),
        write=seconds("snapshot-write"),
    )
    if found.standby and not found.alone:
        raise Failure("--standby needs --restart least: else no pod ever takes another one's place")
    if sum(found.shares.values()) <= 0:
        raise Failure("--shares are all 0: give the kind that fails more, as in node=1")
    if found.data > found.step:
        raise Failure(
            f"--data-wait {options.data_wait} is longer than --step-seconds"
            f" {options.step_seconds}: it is a part of a step"
        )
    if options.every_steps == "auto":
        return replace(found, every_steps=formulas.best_every_steps(found))
    return replace(found, every_steps=_whole("--every-steps", options.every_steps, 1, _MOST_STEPS))


def _per_node(gpus: int, options: argparse.Namespace) -> int:
    """Return the GPUs of a node, of a smaller gang all that it has; raises Failure."""
    count = min(gpus, _whole("--gpus-per-node", options.gpus_per_node, 1, 1024))
    if gpus % count:
        near = gpus - gpus % count
        raise Failure(
            f"--gpus {gpus}: nodes of {count} have no {gpus} GPUs between them; say {near} or"
            f" {near + count}, or another --gpus-per-node"
        )
    return count


def _time(name: str, word: str, *, least: float = 0.0) -> float:
    """Read 90s, 1h30m or 0.5; raises Failure."""
    found = _TIME.findall(word)
    if found and "".join(f"{number}{unit}" for number, unit in found) == word:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in found)
    else:
        seconds = _finite(word)
    if math.isnan(seconds):
        raise Failure(f"{name} {word!r} is no time: write 250ms, 30s, 5m, 2h, 40d or seconds")
    if not least <= seconds <= _MOST_SECONDS:
        raise Failure(f"{name} {word}: it is {least:g}s at least, 36500d at most")
    return seconds


def _finite(word: str) -> float:
    """Read a plain number; NaN where it is none."""
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word, re.ASCII) else math.nan


def _whole(name: str, word: str, least: int, most: int) -> int:
    if not re.fullmatch(r"\d{1,20}", word.strip(), re.ASCII):
        raise Failure(f"{name} {word!r} is no whole number: give one of {least} to {most:,}")
    if not least <= int(word) <= most:
        raise Failure(f"{name} {word}: it is {least} at least, {most:,} at most")
    return int(word)


def _number(name: str, word: str) -> float:
    number = _finite(word)
    if math.isnan(number) or number > _MOST_STEPS:
        raise Failure(f"{name} {word!r} is no number: shares are weights, as in process=54,node=55")
    return number


def _share(name: str, word: str) -> float:
    number = _finite(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    if not 0 <= number <= 1:
        raise Failure(f"{name} {word!r} is no share: write 40% or 0.4")
    return number


def _pairs(
    name: str,
    words: str,
    keys: Iterable[str],
    default: Mapping[str, float],
    read: Callable[[str, str], float],
) -> dict[str, float]:
    """Read KIND=VALUE,...: those that are not named keep their default, else 0."""
    found = dict.fromkeys(keys, 0.0) | dict(default)
    for word in words.split(","):
        key, sign, value = word.strip().partition("=")
        if not sign or key not in found:
            raise Failure(f"{name} {word!r}: write KIND=..., a KIND of {', '.join(found)}")
        found[key] = read(f"{name} {key}", value)
    return found


def _words(numbers: Mapping[str, float]) -> str:
    return ",".join(f"{key}={value:g}" for key, value in numbers.items())


def _times(numbers: Mapping[str, float]) -> str:
    return ",".join(f"{key}={text.short(value)}" for key, value in numbers.items())
