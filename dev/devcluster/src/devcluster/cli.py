"""The `devcluster` command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from devcluster import Failure, binaries, cluster, kueue, lifecycle
from devcluster.api import ApiError
from devcluster.cluster import Wanted
from devcluster.oci import images


def say(line: str) -> None:
    """Show progress; standard output is for results."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog="devcluster",
        description="A real local Kubernetes, built from its Go modules, for tests and demos.",
        epilog="Clusters are kept in $DEVCLUSTER_HOME (/var/lib/devcluster), builds in the cache"
        " ($DDPJOB_CACHE or ~/.cache/ddpjob).",
    )
    top.add_argument("--name", default="dev", help="which cluster (default: dev)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start the cluster, or repair what is missing of it")
    up.add_argument(
        "--nodes", type=int, metavar="N", help="0: control plane only (default: 2, or as before)"
    )
    up.add_argument(
        "--image", action="append", default=[], help="image to load into every node; repeatable"
    )
    up.add_argument("--kwok", type=int, metavar="N", help="add N fake nodes, for scale")
    up.add_argument(
        "--gang-scheduling",
        action=argparse.BooleanOptionalAction,
        help="serve PodGroups and schedule whole gangs or none (default: not, or as before)",
    )
    commands.add_parser("down", help="remove the cluster and all that it made, but no cache")
    shown = commands.add_parser("status", help="what is up, with versions")
    shown.add_argument("--json", action="store_true", help="as one JSON object")
    load = commands.add_parser("load", help="import an image into every node")
    load.add_argument("image", metavar="IMAGE")
    images.configure(commands)
    commands.add_parser("kubeconfig", help="print the path of the administrator's kubeconfig")
    node = commands.add_parser("node", help="make a node fail, or come back")
    node.add_argument("verb", choices=("stop", "start", "partition", "heal"))
    node.add_argument("number", type=int, metavar="N")
    commands.add_parser("kueue", help="install Kueue, or change what is there of it")
    commands.add_parser(
        "build", help="build the programs, all but KWOK and Kueue; print the directory they are in"
    )
    kubectl = commands.add_parser("kubectl", help="run kubectl against the cluster")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGS")
    commands.add_parser("list", help="names of all clusters")
    return top


def run(arguments: argparse.Namespace) -> int:
    """Carry out a parsed command line; return the exit status."""
    name: str = arguments.name
    match arguments.command:
        case "up":
            wanted = Wanted(arguments.nodes, arguments.kwok, arguments.gang_scheduling)
            made = lifecycle.up(name, wanted, arguments.image, say)
            print(made.layout.kubeconfig)
        case "down" | "kueue" as command:
            {"down": lifecycle.down, "kueue": kueue.install}[command](name, say)
        case "status":
            return lifecycle.show_status(name, arguments.json)
        case "load":
            lifecycle.load(name, arguments.image, say)
        case "image":
            images.command(arguments, say)
        case "kubeconfig":
            print(cluster.require(name).layout.kubeconfig)
        case "node":
            lifecycle.node_command(name, arguments.verb, arguments.number, say)
        case "build":
            print(binaries.toolbox(say))
        case "kubectl":
            kubectl(name, arguments.arguments)
        case "list":
            for one in cluster.names():
                print(one)
    return 0


def kubectl(name: str, words: Sequence[str]) -> None:
    """Become kubectl of the cluster's version."""
    arguments = list(words[1:] if words[:1] == ["--"] else words)
    layout = cluster.require(name).layout
    program = str(binaries.ensure(["kubectl"], say)["kubectl"])
    for variable in ("NO_PROXY", "no_proxy"):
        before = os.environ.get(variable)
        os.environ[variable] = f"{before},{layout.gateway}" if before else layout.gateway
    os.execv(program, ["kubectl", f"--kubeconfig={layout.kubeconfig}", *arguments])


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; a failure is one line and status 1."""
    os.umask(0o022)  # pods of no privilege read what is made here
    arguments = parser().parse_args(words)
    try:
        return run(arguments)
    except Failure as failure:
        print(f"devcluster: {failure}", file=sys.stderr)
        return 1
    except (OSError, ApiError) as error:
        print(f"devcluster: {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("devcluster: interrupted; the same command continues", file=sys.stderr)
        return 130
