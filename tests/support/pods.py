"""A hand kubelet: no containers run; it writes to the API server what a kubelet would write.

The api level has a real kube-apiserver, etcd and controller-manager, but no machine. This
class binds pods to a made-up Node, reports them Running, ends them with the exit code that a
test asks for, or as a failed probe does, and removes the objects of deleted pods. What a kubelet
does beyond that (sandboxes, volumes, images) is the business of tests/cluster.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from support.rest import Object, Rest, RestError

_HEARTBEAT = 5.0  # the node controller evicts the pods of a silent node


class HandKubelet:
    """Looks after the pods of one namespace. Use it as a context manager.

    ``remove_pods`` False leaves deleted pods Terminating, as a node that does not answer would;
    ``keeps`` does so for one of them.
    """

    def __init__(
        self, rest: Rest, namespace: str, pod_ip: str = "10.255.0.1", period: float = 0.04
    ) -> None:
        self.rest, self.namespace, self.pod_ip = rest, namespace, pod_ip
        self.own = self.node = f"hand-{namespace}"  # ``node``: new pods are bound there
        self._period = period  # seconds between looks, unless it is woken
        self.wake = threading.Event()
        self.remove_pods = True
        self.keeps: Callable[[Object], bool] = lambda _: False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=self.node, daemon=True)
        self._heartbeat_at = 0.0
        self.trouble: list[str] = []

    def __enter__(self) -> HandKubelet:
        self.rest.post(
            "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.own}}
        )
        self._heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.wake.set()
        self._thread.join(10)
        with contextlib.suppress(RestError):
            self.rest.delete(f"/api/v1/nodes/{self.own}")

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def pods(self, job: str | None = None) -> list[Object]:
        """All pods, or those of one job, by name."""
        selector = f"?labelSelector=ddpjob.dev/job-name={job}" if job else ""
        found = self.rest.items(self.path + selector)
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def finish(
        self, name: str, code: int = 0, message: str = "", reason: str = "", *, uid: str = ""
    ) -> None:
        """End the trainer container of a pod, with an exit code and its last words.

        Of exactly this ``uid``, if one is given; a RestError that is `gone` where it is no more.
        """
        pod = self.rest.get(f"{self.path}/{name}")
        state: Object = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "startedAt": _now(),
            "finishedAt": _now(),
        }
        if message:
            state["message"] = message
        if code > 128:
            state["signal"] = code - 128
        status = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "conditions": _conditions(ready=False),
            "containerStatuses": _containers(pod, {"terminated": state}, ready=False),
        }
        self._patch(name, status, uid or pod["metadata"]["uid"])

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.wake.wait(self._period)
            self.wake.clear()
            try:
                if time.monotonic() - self._heartbeat_at > _HEARTBEAT:
                    self._heartbeat()
                for pod in self.pods():
                    self._look_after(pod)
            except (RestError, OSError) as error:
                self.trouble.append(str(error))

    def _look_after(self, pod: Object) -> None:
        meta, name = pod["metadata"], pod["metadata"]["name"]
        # Whoever deletes or replaces a pod at this very moment wins.
        with self._races():
            if "deletionTimestamp" in meta:
                if self.remove_pods and not self.keeps(pod):
                    self.rest.delete(f"{self.path}/{name}", grace=0, uid=meta["uid"])
            elif not pod["spec"].get("nodeName"):
                self._bind(name, meta["uid"])
                self._run(pod)

    def _bind(self, name: str, uid: str) -> None:
        body: Object = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.node},
        }
        self.rest.post(f"{self.path}/{name}/binding", body)

    def _run(self, pod: Object) -> None:
        status = {
            "phase": "Running",
            "podIP": self.pod_ip,
            "podIPs": [{"ip": self.pod_ip}],
            "startTime": _now(),
            "conditions": _conditions(ready=True),
            "containerStatuses": _containers(pod, {"running": {"startedAt": _now()}}, ready=True),
        }
        self._patch(pod["metadata"]["name"], status, pod["metadata"]["uid"])

    def _patch(self, name: str, status: Object, uid: str) -> None:
        body: Object = {"metadata": {"uid": uid}, "status": status}
        self.rest.merge(f"{self.path}/{name}/status", body)

    def _heartbeat(self) -> None:
        now = _now()
        times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
        condition = {"type": "Ready", "status": "True", "reason": "Hand", "message": "", **times}
        body: Object = {"status": {"conditions": [condition]}}
        self.rest.merge(f"/api/v1/nodes/{self.own}/status", body)
        self._heartbeat_at = time.monotonic()

    @contextlib.contextmanager
    def _races(self) -> Iterator[None]:
        try:
            yield
        except RestError as error:
            if not gone(error):
                raise


def gone(error: RestError) -> bool:
    """Whether it says that the pod was removed meanwhile, replaced or written by somebody else."""
    return error.code in (404, 409) or (error.code == 422 and "metadata.uid" in str(error))


def _conditions(*, ready: bool) -> list[Object]:
    states = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    return [
        {"type": kind, "status": str(state), "lastTransitionTime": _now()}
        for kind, state in states.items()
    ]


def _containers(pod: Object, state: Object, *, ready: bool) -> list[Object]:
    trainer: Any = pod["spec"]["containers"][0]
    return [
        {
            "name": trainer["name"],
            "image": trainer["image"],
            "imageID": "",
            "ready": ready,
            "restartCount": 0,
            "state": state,
        }
    ]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def serving(kubelet: HandKubelet, pages: type[http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve these pages at an address that every pod has meanwhile; yield the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; tells our own address
        address = probe.getsockname()[0]
    server = http.server.ThreadingHTTPServer((address, 0), pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kubelet.pod_ip, before = address, kubelet.pod_ip
    yield server.server_port
    kubelet.pod_ip = before
    server.shutdown()
    server.server_close()
