"""Word a member's end: one line, and a message with its log's end.

evidence.py and the policies ask, and decide what the end means; here are the texts of kubelets,
runtimes and programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ddpjob_contract import PERMANENT_EXIT_CODES, ExitCode
from ddpjob_operator.core.objects.json_read import format_ranges
from ddpjob_operator.core.objects.observe import MESSAGE_MAX, Container, Pod, clean
from ddpjob_operator.core.objects.status import Failure

#: Words for a launcher's kind of end, if the program left none.
KINDS: Final[Mapping[str, str]] = {
    "hang": "hang: no sign of life for longer than spec.hang allows",
    "diverged": "diverged: the ranks disagree, or the NaN policy says stop",
    "peerLost": "peerLost: another rank failed first",
    "lost": "lost: the connection to its launcher broke, but its pod still ran",
    "hardware": "hardware: a GPU failed, not the program",
    "oom": "oom: the kernel killed it for lack of memory",
}
#: Characters of the line that describes an end.
_LINE: Final = 160
#: The last line of a traceback, for programs without a launcher to find it.
_EXCEPTION: Final = re.compile(
    r"^(?:\[\w+\]: ?)*((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?)$", re.MULTILINE
)
#: Of a runtime that could not start a container: what handed the error on.
_LAYERS: Final = re.compile(
    r"^.*(create failed|unable to start container process|container init): ", re.DOTALL
)
#: What a container's command can do to its launcher's exit code, with the cure.
_HIDDEN: Final = (
    "the container ended with exit code 0, which hides that the launcher failed: let the command"
    " end with the launcher (exec, or `set -o pipefail` before a pipe)"
)
#: Of a SIGTERM that nobody is known to have sent; no Event is read to prove it.
_PROBED: Final = (
    "the container ended on SIGTERM, nobody deleted the pod, and the template has a liveness or"
    " startup probe: a failed probe is the likely cause"
)
_SEE_PROBE: Final = (
    "see `kubectl describe pod {0}`, or `kubectl get events` once the pod is gone; raise the"
    " probe's failureThreshold or timeoutSeconds"
)
#: torchrun's own exception says only that one of its processes has failed.
_TORCHRUN: Final = "torch.distributed.elastic"


def shorten(text: str, limit: int = _LINE) -> str:
    """Shorten a text to one line by its middle: figures are at its tail."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    tail = limit // 3
    return f"{line[: limit - tail - 1]}\N{HORIZONTAL ELLIPSIS}{line[len(line) - tail :]}"


def describe(loss: Failure) -> str:
    """Describe a loss in one line; the log's end stays in status.lastFailure."""
    rank = f" (rank {loss.rank})" if loss.rank is not None else ""
    node = f" on {loss.node}" if loss.node else ""
    code = f", exit code {loss.exit_code}" if loss.exit_code is not None else ""
    # The exit code is there anyway; other reasons add to an exception.
    reason = "" if loss.exception and loss.reason.startswith("ExitCode") else loss.reason
    what = ": ".join(filter(None, (reason, loss.exception)))
    return f"replica {loss.replica}{rank}{node}: {what}{code} [{loss.cls}]"


def ended(pod: Pod, by: Container, *, oom: bool, probed: bool) -> tuple[str, str]:
    """Say in one line, and in a message, why the container ``by`` ended the pod."""
    report, message = pod.trainer.report, _message(pod)
    if probed:
        return _PROBED, clean(f"{_PROBED}; {_SEE_PROBE.format(pod.name)}\n{message}")
    if oom and by is pod.trainer and not (report and report.exception):
        said = _out_of_memory(by)
        return said, clean(f"{said}\n{message}")
    return _said(pod, by), message


def _said(pod: Pod, ended: Container) -> str:
    """Quote in one line the kubelet, the runtime or the program; "" if silent.

    Of an init container that ended the pod the last line counts.
    """
    words = pod.message.splitlines()
    if words and ended is not pod.trainer:
        return shorten(": ".join(dict.fromkeys((words[0], words[-1]))))
    if not words and ended.reason == "StartError":  # behind the layers that handed it on
        words = [_LAYERS.sub("", ended.message)]
    return shorten(words[0] if words else _exception(pod.trainer))


def _out_of_memory(ended: Container) -> str:
    """Describe a container that was killed as a whole, so that no process could report."""
    limit = f"limit {ended.memory}" if ended.memory else "no memory limit"
    field = "limits" if ended.memory else "requests"
    cure = f"raise resources.{field}.memory, or let the program use less"
    return f"out of memory ({limit}): the kernel killed it: {cure}"


def initializing(init: Container) -> str:
    """Say in what state, and since when, an init container keeps the trainer from its start."""
    if init.state == "running":
        since = f" since {init.started_at:%H:%M:%S} UTC" if init.started_at else ""
        return f"init container {init.name} has run{since}, and the trainer starts after it"
    return f"init container {init.name} ends again and again, last with exit code {init.exit_code}"


def left_early(loss: str, done: frozenset[int], members: Mapping[int, Pod]) -> str:
    """Name the replicas that ended with 0 before one that needs them was lost."""
    after = after_step(done, members)
    who = f"{replicas(done, 40)} ended with 0 (Succeeded){after}"
    return f"{who} while others waited for them; then {loss}"


def plural(number: int, word: str) -> str:
    """Write 1, "pod" as "1 pod" and 3, "pod" as "3 pods"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def every(number: int, word: str) -> str:
    """Write 1, "replica" as "the only replica" and 3, "replica" as "all 3 replicas"."""
    return f"the only {word}" if number == 1 else f"all {plural(number, word)}"


def replicas(some: frozenset[int], limit: int) -> str:
    """Name replicas, as `replica 0` or `replicas 0,2-5`, their list cut to so many characters."""
    return f"replica{'' if len(some) == 1 else 's'} {clean(format_ranges(some), limit)}"


def after_step(done: frozenset[int], members: Mapping[int, Pod]) -> str:
    """Say after which step the first of these ended; "" if no report has one."""
    reports = (members[replica].trainer.report for replica in done if replica in members)
    steps = [report.step for report in reports if report and report.step is not None]
    return f" after step {min(steps)}" if steps else ""


def _message(pod: Pod) -> str:
    """Say why the pod ended, add the program's error, then its log's end."""
    report = pod.trainer.report
    hidden = _HIDDEN if pod.trainer.hides else ""
    lines = [line for line in (pod.message, _exception(pod.trainer), hidden) if line]
    room = MESSAGE_MAX - len("\n".join(lines))
    log = report.log if report else (pod.trainer.message[-max(1, room - 1) :],)
    last = len(log)
    while last > 0 and len(log[last - 1]) < room:
        last -= 1
        room -= len(log[last]) + 1
    return clean("\n".join([*lines, *log[last:]]))


def _exception(trainer: Container) -> str:
    usage = trainer.exit_code in PERMANENT_EXIT_CODES  # its last line says why, as argparse's does
    if report := trainer.report:
        last = report.log[-1] if usage and report.log else ""
        return report.exception or KINDS.get(report.kind, last)
    if trainer.exit_code == ExitCode.SIGKILL:
        return ""  # what its log ends with it has survived
    lines = _EXCEPTION.findall(trainer.message)
    found = next((line for line in reversed(lines) if not line.startswith(_TORCHRUN)), "")
    return found or (trainer.message.rstrip().rpartition("\n")[2] if usage else "")
