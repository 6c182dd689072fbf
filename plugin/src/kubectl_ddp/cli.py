"""Parse the command line: __main__.py calls run(), which calls one function of commands/."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kubectl_ddp import __version__
from kubectl_ddp.commands import (
    account,
    cp,
    events,
    launch,
    logs,
    pods,
    status,
    suspension,
    why,
)
from kubectl_ddp.kubectl import Failure, Kubectl
from kubectl_ddp.script import manifest
from kubectl_ddp.text import clean

_FLAGS = ("namespace", "context", "kubeconfig")
_INTERRUPTED = 130
_NOBODY_READS = 141

_TRAVELS = """\
A script that is on this machine travels in a ConfigMap with the other FILES, so the stock image
will do; one that is not must be in --image, or below /snapshots on the claim. FILES are files and
folders. The folder in which this command is called becomes the script's working directory: all lie
below it in the pods as they do here. What follows -- are the script's own arguments.
"""
_RUN = f"""\
{_TRAVELS}
Each run has a new name, from the script's, and its snapshots go to the claim SCRIPT-snapshots,
which is made where it is missing (10Gi, ReadWriteMany). With --name a run of a deleted job's name
goes on from its snapshots. Ctrl-C asks whether to leave the job running. Exit code: 0 when it has
succeeded, 3 when it has failed, 130 after Ctrl-C.

examples:
  kubectl ddp run train.py --replicas 2 -- --lr 0.1
  kubectl ddp run train.py models vocab.txt --gpus 8 --output runs
  kubectl ddp run -m package.train --dry-run         prints what it would create
"""
_INIT = f"""\
{_TRAVELS}
examples:
  ddpjob init train.py | kubectl apply --server-side -f -
  ddpjob init train.py models vocab.txt --replicas 4 --gpus 8 -- --lr 0.1 > job.yaml
  ddpjob init src/train.py data --output runs > job.yaml
  ddpjob init a.py --output out --resume-args '--from {{newest}}' --resume-when 'out/*.pt'
  ddpjob init -m package.train > job.yaml            all of the folder package
  ddpjob init /app/train.py --image REGISTRY/mine:1 > job.yaml
  ddpjob init /snapshots/code-1/train.py --snapshots CLAIM > job.yaml

The claim of --snapshots must exist and offer ReadWriteMany; --claim 10Gi makes it, too.
"""

Command = Callable[[Kubectl, argparse.Namespace], int]


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; print a failure as one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack what a message has
    options = _parsed(list(arguments))
    given = vars(options)
    flags = tuple(f"--{name}={given[name]}" for name in _FLAGS if name in given)
    try:
        code: int = options.run(Kubectl(flags), options)
        sys.stdout.flush()
        return code
    except Failure as failure:
        print(f"kubectl-ddp: {clean(str(failure))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python would complain at its end, when it flushes into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse the words; those after -- are the script's."""
    at = words.index("--") if "--" in words else len(words)
    words, own = words[:at], words[at + 1 :]
    for n, word in enumerate(words[:-1]):
        if word == "--resume-args":  # its words may begin with --, as options of ours do
            words[n : n + 2] = [f"{word}={words[n + 1]}"]
            break
    top = parser()
    options, unknown = top.parse_known_args(words, argparse.Namespace(arguments=own))
    of_script, cure = "script" in vars(options), ""
    if of_script and unknown:  # argparse takes no FILES after an option
        first = next((n for n, word in enumerate(unknown) if word.startswith("-")), len(unknown))
        options.files = [*options.files, *map(Path, unknown[:first])]
        del unknown[:first]
    if of_script and unknown:
        at = words.index(unknown[0])
        ours, left = words[:at], list(unknown)
        for word in words[at:]:
            if left and word == left[0]:
                del left[0]
            else:
                ours.append(word)
        shown = shlex.join(["kubectl", "ddp", *ours, "--", *unknown, *own])
        cure = f"; those of the script follow --, as in: {shown}"
    if unknown or (own and not of_script):
        top.error(f"unrecognized arguments: {' '.join(unknown or own)}{cure}")
    return options


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; kubectl's flags may come before or after them."""
    flags = _flags()
    top = argparse.ArgumentParser(
        prog="kubectl ddp",
        description="Run DDPJobs and watch them, by your own kubectl: its contexts and rights.",
        parents=[flags],
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, what: str, run: Command, **more: Any) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}.", parents=[flags], **more
        )
        one.set_defaults(run=run)
        return one

    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    one = add(
        "run", "a script to its end: job, phase, logs, result", launch.run, epilog=_RUN, **raw
    )
    manifest.add(one)
    _option(one, "--dry-run", "print the manifest, create nothing")
    one = add("init", "print the DDPJob manifest for a script", launch.init, epilog=_INIT, **raw)
    manifest.add(one)
    one = add("cp", "results from the job's volume to this machine", cp.run)
    what = "JOB: its output folder; PATH: below the folder of its snapshots; /PATH: as in its pods"
    one.add_argument("source", metavar="JOB[:PATH]", help=what)
    one.add_argument("folder", metavar="DIR", type=Path, help="into this folder")
    _option(
        one, "--weights", "the weights of its newest snapshot instead, as DIR/model.safetensors"
    )
    _reader(one)
    one = add("status", "all jobs, or one with the table of its gang", status.run)
    one.add_argument("job", nargs="?", metavar="JOB", help="without it: a line for each job")
    _option(one, "-A,--all-namespaces", "jobs of all namespaces")
    _option(one, "-w,--watch", "again on change, until it ends")
    one.add_argument("-o", "--output", choices=["json"], help="the job and its pods for programs")
    _option(one, *_FULL)
    about = "The right to get ddpjobs is enough; Events, pods and pods/exec make it better."
    one = _of_job(add("why", "why a job failed, on one page, newest first", why.run, epilog=about))
    _option(one, "--all", "all recorded failures (default: 3)")
    _option(one, "--html FILE", "write all of it as one page for a browser; -: to stdout")
    _option(one, "--events FILE", "with --html: draw the curves of this event log of rank 0")
    what = "where no pod of the job runs, start one for some seconds that reads what launchers kept"
    _option(one, "--reader", f"{what} beside the snapshots")
    _reader(one)
    _logs(_of_job(add("logs", "logs of all replicas, each line with its pod", logs.run)))
    what = "the story of a job and its pods: Events and failures"
    _option(_of_job(add("events", what, events.run)), *_FULL)
    _of_job(add("account", "where the job's pod-hours went, its goodput and its end", account.run))
    right = "Needs the right to create pods/exec, and `ddpjob-trainer run` in the pods."
    one = _of_job(add("stacks", "where each process is now: its stacks", pods.stacks, epilog=right))
    _option(one, *_REPLICA)
    hung = "those of the last process that hung instead, from each pod; needs get on pods/proxy"
    _option(one, "--hung", hung)
    one = _of_job(add("profile", "a profile of one rank's next steps", pods.profile, epilog=right))
    _option(one, "--rank N", "which one (default: 0)", int, 0)
    _option(one, "--steps N", "how many (default: 5)", int, 5)
    _of_job(add("suspend", "remove the pods and keep the job", suspension.suspend))
    what = "start a suspended job again, from its newest snapshot"
    _of_job(add("resume", what, suspension.resume))
    what = "the snapshots of a job, looked up in one of its pods"
    right = "Needs the right to create pods/exec, and an image with ddpjob-trainer."
    one = add("snapshots", what, pods.snapshots, epilog=right)
    one.add_argument("verb", nargs="?", choices=["ls"], metavar="ls", help="what it does anyway")
    _of_job(one)
    return top


_FULL = ("--full", "messages whole, not cut after some lines")
_REPLICA = ("--replica N", "this one only (default: all)", int)


def _option(
    one: argparse._ActionsContainer, words: str, about: str, kind: Any = str, default: Any = None
) -> None:
    """Add `--name`, a switch, or `--name VALUE`; both may have a short name before a comma."""
    names, _, metavar = words.partition(" ")
    value = {"metavar": metavar, "type": kind, "default": default}
    how: dict[str, Any] = value if metavar else {"action": "store_true"}
    one.add_argument(*names.split(","), help=about, **how)


def _of_job(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
    one.add_argument("job", metavar="JOB", help="name of the DDPJob")
    return one


def _reader(one: argparse.ArgumentParser) -> None:
    group = one.add_argument_group(
        "where no pod of the job runs",
        "One of the job's image is made with your rights, for some seconds. It mounts a claim,"
        " read-only, and does not run as root.",
    )
    _option(group, "-y,--yes", "make it without asking")
    trust = (
        "let it have what the job's template asks for: a volume of any kind, as a hostPath,"
        " uid 0, SELinux options, tolerations, chosen nodes, its service account. Only for a job"
        " whose owner you would give these"
    )
    _option(group, "--trust-job", trust)
    _option(group, "--node NAME", "read the hostPath of this node", str, "")


def _logs(one: argparse.ArgumentParser) -> None:
    _option(one, *_REPLICA)
    _option(one, "-f,--follow", "go on until the job ends")
    _option(one, "--tail N", "last lines of each (default: all)", int, -1)
    _option(one, "--since TIME", "only what is newer: 30s, 5m, 2h")
    _option(one, "--failed", "the last failure, and the log of its pod")
    about = "the pod's log while it is there, else the last lines kept beside the snapshots"
    _option(one, "--attempt N", f"of attempt N: {about}", int)
    _option(one, "--round N", "of round N of an attempt", int)
    _option(one, "--rank N", f"of process N: {about}", int)
    _reader(one)


def _flags() -> argparse.ArgumentParser:
    """Build kubectl's flags without defaults, so that those after the command keep earlier ones."""
    flags = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = flags.add_argument_group("passed on to kubectl")
    group.add_argument("-n", "--namespace", metavar="NAME", help="default: that of the context")
    group.add_argument("--context", metavar="NAME", help="of the kubeconfig")
    group.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, ~/.kube/config")
    return flags
