"""Run the user's own kubectl, and word its refusals so that they help."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpjob_contract import crd


class Failure(Exception):  # noqa: N818 - the user's word for it
    """Printed on stderr as `kubectl-ddp: LINE`; the exit code is 1."""


class Missing(Failure):
    """The job is not there, which no further look changes."""


Object = dict[str, Any]

#: With its group: another operator may have a kind of the same name.
DDPJOBS = f"{crd.PLURAL}.{crd.GROUP}"

_END_SECONDS = 5.0  # after SIGTERM; kubectl takes milliseconds
#: The API server takes objects of up to 10,000 levels.
_DEEPEST = 12_000
_FORBIDDEN = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_NOTHING_NEW = re.compile(
    r"See 'kubectl|command terminated with exit code|tar: Exiting with failure status"
)
_NO_JOB = re.compile(rf'{re.escape(DDPJOBS)} "(?P<name>[^"]+)" not found')


@dataclass(frozen=True, slots=True)
class Kubectl:
    """``flags`` go before every command: --namespace, --context, --kubeconfig."""

    flags: tuple[str, ...] = ()

    @property
    def more(self) -> str:
        """Return the flags as the end of a command that is printed."""
        return "".join(f" {shlex.quote(flag)}" for flag in self.flags)

    def start(self, *args: str, **streams: Any) -> subprocess.Popen[str]:
        """Start it, with the ends of its streams as given; raise Failure without kubectl."""
        # It writes UTF-8 whatever the locale is.
        streams |= {"encoding": "utf-8", "errors": "replace"}
        try:
            return subprocess.Popen(["kubectl", *self.flags, *args], **streams)
        except FileNotFoundError:
            raise Failure(
                "no kubectl on PATH: install it (https://kubernetes.io/docs/tasks/tools/)"
            ) from None
        except OSError as error:
            raise Failure(f"kubectl does not start: {error.strerror}") from None

    @contextlib.contextmanager
    def running(self, *args: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
        """Start it and end it, even if SIGTERM comes while it starts."""
        process = None
        try:
            with _put_off(signal.SIGTERM):
                process = self.start(*args, **streams)
            yield process
        finally:
            if process is not None:
                with process:
                    _end(process)

    def read(self, *args: str, given: str | None = None) -> str:
        """Run it to its end, with ``given`` on its stdin; return its stdout; raise Failure."""
        stdin = None if given is None else subprocess.PIPE
        pipe = subprocess.PIPE
        with self.running(*args, stdin=stdin, stdout=pipe, stderr=pipe) as process:
            out, said = process.communicate(given)
        if process.returncode:
            raise (Missing if _NO_JOB.search(said) else Failure)(explained(said))
        return out

    def get(self, *args: str) -> Object:
        """Run `kubectl get ARGS -o json` for one object; raise Failure."""
        text = self.read("get", *args, "-o", "json")
        found = _decoded(text)
        if not isinstance(found.get("metadata"), dict) or not isinstance(found.get("spec"), dict):
            raise _unlike("object", text)
        return found

    def items(self, *args: str) -> list[Object]:
        """Run `kubectl get ARGS -o json` for a list; raise Failure."""
        text = self.read("get", *args, "-o", "json")
        found = _decoded(text).get("items")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise _unlike("list of objects", text)
        return found

    def show(self, *args: str) -> None:
        """Run it with our own stdout; raise Failure."""
        with self.running(*args, stderr=subprocess.PIPE) as process:
            _, said = process.communicate()
        judge(process, said)


def judge(process: subprocess.Popen[str], said: str) -> None:
    """Raise the error of a kubectl that has ended; ``said`` is its stderr."""
    if process.returncode == -signal.SIGPIPE:
        raise BrokenPipeError  # the reader has had enough: `| head`
    if process.returncode:
        raise Failure(explained(said))


def _end(process: subprocess.Popen[str]) -> None:
    """End it with SIGTERM, then SIGKILL for a wrapper that ignores it."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


@contextlib.contextmanager
def _put_off(number: signal.Signals) -> Iterator[None]:
    """Defer the signal's handler, which raises, until after this."""
    came: list[int] = []
    handler = signal.signal(number, lambda *_: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:
            signal.raise_signal(number)


def _decoded(text: str) -> Object:
    """Parse JSON; one user's job of 1,500 levels must not hide all others."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEEPEST))
    try:
        found = json.loads(text)
    except RecursionError:
        what = "an object is nested too deep to be read: name a job, or a --namespace without it"
        raise Failure(what) from None
    except ValueError:
        raise _unlike("JSON", text) from None
    finally:
        sys.setrecursionlimit(limit)
    return found if isinstance(found, dict) else {}


def _unlike(what: str, text: str) -> Failure:
    begins = text.strip()[:80] or "nothing"
    return Failure(
        f"kubectl answered no {what} but {begins!r}: is the kubectl on PATH the real one?"
    )


def explained(said: str) -> str:
    """Reduce kubectl's stderr to one line."""
    if f'resource type "{DDPJOBS.partition(".")[0]}"' in said:
        return (
            "this cluster has no DDPJobs: install the operator's chart (helm install ddpjob"
            " charts/ddpjob -n ddpjob-system --create-namespace), or name another --context"
        )
    if refusal := forbidden(said):
        return refusal
    if missing := _NO_JOB.search(said):
        return f'no DDPJob "{missing["name"]}" here: `kubectl ddp status -A` shows them all'
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # First come errors of its libraries, last the one that all share.
    telling = [line for line in lines if not _NOTHING_NEW.match(line)] or lines
    return f"kubectl: {telling[-1]}" if telling else "kubectl failed without a word"


def forbidden(said: str) -> str:
    """Name the right that the API server misses; else return an empty string."""
    found = _FORBIDDEN.search(said)
    if not found:
        return ""
    group = f" of {found['group']}" if found["group"] else ""
    where = f"in namespace {found['namespace']}" if found["namespace"] else "in all namespaces"
    return (
        f"you may not {found['verb']} {found['resource']}{group} {where}: ask for a role with"
        f" verb {found['verb']} on resource {found['resource']}"
    )
