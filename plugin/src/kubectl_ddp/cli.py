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
    one.add_argument("--dry-run", action="store_true", help="print the manifest, create nothing")
    one = add("init", "print the DDPJob manifest for a script", launch.init, epilog=_INIT, **raw)
    manifest.add(one)
    one = add("cp", "results from the job's volume to this machine", cp.run)
    what = "JOB: its output folder; PATH: below the folder of its snapshots; /PATH: as in its pods"
    one.add_argument("source", metavar="JOB[:PATH]", help=what)
    one.add_argument("folder", metavar="DIR", type=Path, help="into this folder")
    weights = "the weights of its newest snapshot instead, as DIR/model.safetensors"
    one.add_argument("--weights", action="store_true", help=weights)
    _reader(one)
    one = add("status", "all jobs, or one with the table of its gang", status.run)
    one.add_argument("job", nargs="?", metavar="JOB", help="without it: a line for each job")
    one.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    one.add_argument("-w", "--watch", action="store_true", help="again on change, until it ends")
    one.add_argument("-o", "--output", choices=["json"], help="the job and its pods for programs")
    _full(one)
    about = "The right to get ddpjobs is enough; Events, pods and pods/exec make it better."
    _why(add("why", "why a job failed, on one page, newest first", why.run, epilog=about))
    _logs(add("logs", "logs of all replicas, each line with its pod", logs.run))
    one = add("events", "the story of a job and its pods: Events and failures", events.run)
    _job(one)
    _full(one)
    _job(add("account", "where the job's pod-hours went, its goodput and its end", account.run))
    right = "Needs the right to create pods/exec, and `ddpjob-trainer run` in the pods."
    one = add("stacks", "where each process is now: its stacks", pods.stacks, epilog=right)
    _job(one)
    _replica(one)
    hung = "those of the last process that hung instead, from each pod; needs get on pods/proxy"
    one.add_argument("--hung", action="store_true", help=hung)
    one = add("profile", "a profile of one rank's next steps", pods.profile, epilog=right)
    _job(one)
    one.add_argument("--rank", type=int, default=0, metavar="N", help="which one (default: 0)")
    one.add_argument("--steps", type=int, default=5, metavar="N", help="how many (default: 5)")
    _job(add("suspend", "remove the pods and keep the job", suspension.suspend))
    _job(add("resume", "start a suspended job again, from its newest snapshot", suspension.resume))
    one = add(
        "snapshots",
        "the snapshots of a job, looked up in one of its pods",
        pods.snapshots,
        epilog="Needs the right to create pods/exec, and an image with ddpjob-trainer.",
    )
    one.add_argument("verb", nargs="?", choices=["ls"], metavar="ls", help="what it does anyway")
    _job(one)
    return top


def _why(one: argparse.ArgumentParser) -> None:
    _job(one)
    one.add_argument("--all", action="store_true", help="all recorded failures (default: 3)")
    one.add_argument(
        "--html", metavar="FILE", help="write all of it as one page for a browser; -: to stdout"
    )
    one.add_argument(
        "--events", metavar="FILE", help="with --html: draw the curves of this event log of rank 0"
    )
    one.add_argument(
        "--reader",
        action="store_true",
        help="where no pod of the job runs, start one for some seconds that reads what launchers"
        " kept beside the snapshots",
    )
    _reader(one)


def _reader(one: argparse.ArgumentParser) -> None:
    group = one.add_argument_group(
        "where no pod of the job runs",
        "One of the job's image is made with your rights, for some seconds. It mounts a claim,"
        " read-only, and does not run as root.",
    )
    group.add_argument("-y", "--yes", action="store_true", help="make it without asking")
    group.add_argument(
        "--trust-job",
        action="store_true",
        help="let it have what the job's template asks for: a volume of any kind, as a hostPath,"
        " uid 0, SELinux options, tolerations, chosen nodes, its service account. Only for a job"
        " whose owner you would give these",
    )
    group.add_argument("--node", metavar="NAME", default="", help="read the hostPath of this node")


def _logs(one: argparse.ArgumentParser) -> None:
    _job(one)
    _replica(one)
    one.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    one.add_argument("--tail", type=int, metavar="N", help="last lines of each (default: all)")
    one.add_argument("--since", metavar="TIME", help="only what is newer: 30s, 5m, 2h")
    one.add_argument(
        "--failed", action="store_true", help="the last failure, and the log of its pod"
    )
    about = "the pod's log while it is there, else the last lines kept beside the snapshots"
    one.add_argument("--attempt", type=int, metavar="N", help=f"of attempt N: {about}")
    one.add_argument("--round", type=int, metavar="N", help="of round N of an attempt")
    one.add_argument("--rank", type=int, metavar="N", help=f"of process N: {about}")
    _reader(one)


def _flags() -> argparse.ArgumentParser:
    """Build kubectl's flags without defaults, so that those after the command keep earlier ones."""
    flags = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = flags.add_argument_group("passed on to kubectl")
    group.add_argument("-n", "--namespace", metavar="NAME", help="default: that of the context")
    group.add_argument("--context", metavar="NAME", help="of the kubeconfig")
    group.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, ~/.kube/config")
    return flags


def _job(one: argparse.ArgumentParser) -> None:
    one.add_argument("job", metavar="JOB", help="name of the DDPJob")


def _full(one: argparse.ArgumentParser) -> None:
    one.add_argument("--full", action="store_true", help="messages whole, not cut after some lines")


def _replica(one: argparse.ArgumentParser) -> None:
    one.add_argument("--replica", type=int, metavar="N", help="this one only (default: all)")
