"""The stage of the api level: a namespace with an operator, a proxy and a hand kubelet.

The API server, etcd and the controllers are real; the operator is a process of its own that
reaches them through the proxy only.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.chronicle import Chronicle
from support.manifest import ddpjob
from support.operator import PATHS, OperatorProcess, write_kubeconfig
from support.patience import PATIENCE
from support.pods import HandKubelet
from support.proxy import Call, Proxy
from support.rest import JOBS, Object, Rest, RestError, eventually
from support.rights import Rights

#: Quick, so that tests need not wait; the defaults are for clusters. Only the lease is long, lest
#: it be lost on a busy machine: the next process has the same name, and takes it at once.
FLAGS = ("--lease-seconds", "120", "--resync-seconds", "1", "--progress-seconds", "0.5")


@dataclass
class Arena:
    """What a test plays with. ``rest`` reaches the API server directly, not by the proxy.

    ``history`` is what the store tells of jobs and pods: ``verify`` holds it to the invariants.
    """

    rest: Rest
    namespace: str
    folder: Path
    proxy: Proxy
    kubelet: HandKubelet
    history: Chronicle
    operators: list[OperatorProcess] = field(default_factory=list)
    of_many: bool = False  # one of many that share the machine
    breaks: Callable[[], None] | None = None  # changes its operators as they start
    _token_file: Path | None = None

    def operator(self, *flags: str, name: str = "op-a", paths: str = PATHS) -> OperatorProcess:
        """An operator for this namespace, not started yet. ``paths``: of another version."""
        path = self.folder / "kubeconfig"
        kubeconfig = write_kubeconfig(path, self.proxy.url, self.namespace, self._token_file)
        forked = self.of_many or self.breaks is not None
        how: Any = {"name": name, "forked": forked, "breaks": self.breaks, "paths": paths}
        made = OperatorProcess(kubeconfig, self.namespace, self.folder, *FLAGS, *flags, **how)
        self.operators.append(made)
        return made

    def start_operator(self, *flags: str) -> OperatorProcess:
        """An operator that is up and leads; the proxy's faults can kill it."""
        made = self.operator(*flags).start()
        made.wait_ready()
        made.wait_leading()
        self.proxy.kill = made.kill
        return made

    def use_token(self, token: str) -> None:
        """What operators started later prove themselves by, and those there when they ask again."""
        path = self.folder / "token.json"
        spare = path.with_suffix(".new")
        status = {"token": token, "expirationTimestamp": "2000-01-01T00:00:00Z"}
        credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
        spare.write_text(json.dumps({**credential, "status": status}))
        spare.rename(path)
        self._token_file = path

    def rights(self) -> Rights:
        """The operator's own account, which from now on is asked for what it may do."""
        found = Rights(self.rest, self.namespace)
        self.use_token(found.token)
        self.proxy.own_rights = True
        return found

    def verify(self) -> None:
        """Hold what happened since the last time against the invariants; raises Violation."""
        self.history.state.deposed |= len({o.name for o in self.operators}) > 1
        self.history.verify(
            lambda: eventually("no write is under way", lambda: not self.proxy.unanswered)
        )

    def job_path(self, name: str = "") -> str:
        return f"{JOBS}/namespaces/{self.namespace}/ddpjobs" + (f"/{name}" if name else "")

    def path(self, plural: str, name: str = "", group: str = "/api/v1") -> str:
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def job(self, name: str, **spec: Any) -> Object:
        """A DDPJob of 3 replicas whose pods the real scheduler leaves alone."""
        body = ddpjob(name, **spec)
        if "template" not in spec:
            body["spec"]["template"]["spec"]["schedulerName"] = "hand"
        return body

    def apply(self, name: str, **spec: Any) -> Object:
        """Create such a job."""
        return self.rest.post(self.job_path(), self.job(name, **spec))

    def status(self, name: str) -> Object:
        return dict(self.rest.get(self.job_path(name)).get("status") or {})

    def condition(self, name: str, kind: str) -> Object:
        """The condition, or an empty one."""
        found = self.status(name).get("conditions") or []
        return next((c for c in found if c["type"] == kind), {})

    def wait_status(
        self, name: str, what: str, check: Callable[[Object], object], seconds: float = PATIENCE
    ) -> Object:
        """Wait until the job's status is as wanted and return it."""

        def look() -> Object | None:
            status = self.status(name)
            return status if check(status) else None

        try:
            return eventually(f"{name}: {what}", look, seconds)
        except AssertionError as error:
            log = "\n".join(operator.log() for operator in self.operators)
            raise AssertionError(f"{error}\nstatus {self.status(name)}\n{log}") from None

    def wait_phase(
        self, name: str, phase: str, attempt: int | None = None, seconds: float = PATIENCE
    ) -> Object:
        """Wait for a phase, of a certain attempt if one is given; return the status."""
        return self.wait_status(
            name,
            f"phase {phase}, attempt {attempt}",
            lambda s: s.get("phase") == phase and attempt in (None, s.get("attempt")),
            seconds,
        )

    def wait_condition(self, name: str, kind: str, reason: str = "") -> Object:
        """Wait until a condition is true, for that reason if one is given; return it."""

        def told(status: Object) -> bool:
            found = status.get("conditions") or ()
            true = [c["reason"] for c in found if (c["type"], c["status"]) == (kind, "True")]
            return reason in true if reason else bool(true)

        self.wait_status(name, f"{kind} {reason}", told)
        return self.condition(name, kind)

    def remove(self, name: str) -> None:
        """Delete the job if it is there, and its pods, for the garbage collector is slow."""
        with contextlib.suppress(RestError):
            self.rest.delete(self.job_path(name))

        def gone() -> bool:
            for pod in self.kubelet.pods(name):
                with contextlib.suppress(RestError):
                    self.rest.delete(self.path("pods", pod["metadata"]["name"]), grace=0)
            return not self.kubelet.pods(name)

        eventually(f"the pods of {name} are gone", gone)

    def succeed(self, name: str) -> Object:
        """End all of the job's pods well and wait for the end."""
        for pod in self.kubelet.pods(name):
            self.kubelet.finish(pod["metadata"]["name"])
        return self.wait_phase(name, "Succeeded")

    def attempts(self, name: str) -> list[tuple[str, str]]:
        """(pod, attempt) of all pods of the job that are there and not going."""
        return [
            (pod["metadata"]["name"], pod["metadata"]["labels"]["ddpjob.dev/attempt"])
            for pod in self.kubelet.pods(name)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def quiet_resyncs(self, count: int = 3) -> list[Call]:
        """Let the operator look at everything ``count`` times; the writes that it made."""
        self.proxy.clear()

        def lists() -> int:
            path = self.job_path()
            return sum(c.path == path and "watch" not in c.query for c in self.proxy.calls)

        eventually(f"{count} resyncs", lambda: lists() > count)
        return self.proxy.writes()


#: All stages that are up: after each test what happened on them is judged (api/conftest.py).
OPEN: list[Arena] = []


@contextlib.contextmanager
def arena(kubeconfig: Path, folder: Path, *, of_many: bool = False) -> Iterator[Arena]:
    """A fresh namespace with proxy and hand kubelet; everything in it goes at the end.

    ``of_many``: it is judged by whoever made it, it looks only when woken, its operators come from
    a fork server, and its namespace stays: to remove one costs the API server as much as a story.
    """
    rest = Rest(kubeconfig)
    namespace = f"t-{secrets.token_hex(4)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    rest.post("/api/v1/namespaces", body)
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    eventually("the namespace's ServiceAccount", lambda: rest.find(account))
    with (
        Proxy(rest) as proxy,
        Chronicle(rest, namespace, lambda: proxy.made) as history,
        HandKubelet(rest, namespace, period=1.0 if of_many else 0.04) as kubelet,
    ):
        stage = Arena(rest, namespace, folder, proxy, kubelet, history, of_many=of_many)
        history.listeners.append(lambda *_: kubelet.wake.set())
        if not of_many:
            OPEN.append(stage)
        try:
            yield stage
            stage.verify()
        finally:
            OPEN[:] = [one for one in OPEN if one is not stage]
            for operator in stage.operators:
                operator.kill()
            if not of_many:
                with contextlib.suppress(RestError):
                    rest.delete(f"/api/v1/namespaces/{namespace}")
