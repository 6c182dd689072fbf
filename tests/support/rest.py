"""A small synchronous client for tests: what kubectl would do, without starting kubectl.

Independent of the operator's own API code on purpose, so that a fault in the one does not
hide in the other.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from support.patience import PATIENCE, T, wait_for

Object = dict[str, Any]

JOBS = "/apis/ddpjob.dev/v1alpha1"
#: Of a request; an API server gives one up after 60 s. What is asked twice may be stored twice.
ANSWER_SECONDS = 90.0


#: For what is reached without a cluster's credentials, whatever proxy the environment names.
urlopen = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class RestError(Exception):
    """Any answer that is not a success."""

    def __init__(self, code: int, body: Object) -> None:
        super().__init__(f"{code} {body.get('reason')}: {body.get('message')}")
        self.code, self.body = code, body


class Rest:
    """One kubeconfig's cluster; connections are per thread."""

    def __init__(self, kubeconfig: Path | str) -> None:
        config = yaml.safe_load(Path(kubeconfig).read_text())
        context = next(
            c["context"] for c in config["contexts"] if c["name"] == config["current-context"]
        )
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
        self.server: str = cluster["server"].rstrip("/")
        self.url = urllib.parse.urlsplit(self.server)
        base = Path(kubeconfig).parent
        secure = self.url.scheme == "https"
        self.context = _tls(base, cluster, user) if secure else None
        #: For those who have a token: beside a client certificate it would not be looked at.
        self.nobodys_context = _tls(base, cluster, {}) if secure else None
        self.token: str | None = user.get("token")
        self.headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self._local = threading.local()

    def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """One request; RestError unless it succeeds. A stale connection is tried once more."""
        headers = {"Accept": accept, "Content-Type": content_type, **self.headers}
        data = json.dumps(body).encode() if body is not None else None
        for last in (False, True):
            connection = self._connection()
            try:
                connection.request(method, path, data, headers)
                response = connection.getresponse()
                text = response.read()
                break
            except (http.client.HTTPException, OSError):
                self._local.connection = None
                if last:
                    raise
        found = json.loads(text) if text.startswith(b"{") else {"message": text.decode()}
        if response.status >= 300:
            raise RestError(response.status, found)
        return dict(found)

    def get(self, path: str) -> Object:
        return self.call("GET", path)

    def find(self, path: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            return self.get(path)
        except RestError as error:
            if error.code == 404:
                return None
            raise

    def items(self, path: str) -> list[Object]:
        return list(self.get(path).get("items") or [])

    def list_metadata(self, path: str) -> Object:
        """A list of which the objects have their metadata only."""
        kind = "as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        return self.call("GET", path, accept=f"application/json;{kind}")

    def post(self, path: str, body: Object) -> Object:
        return self.call("POST", path, body)

    def merge(self, path: str, body: Object) -> Object:
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path: str, grace: int | None = None, uid: str | None = None) -> Object:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        return self.call("DELETE", path, options)

    def connect(self) -> http.client.HTTPConnection:
        """A connection of one's own."""
        host, port = self.url.hostname or "", self.url.port
        if self.context is None:
            return http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
        more: Any = {"context": self.context, "timeout": ANSWER_SECONDS}
        return http.client.HTTPSConnection(host, port, **more)

    def _connection(self) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self.connect()
        return connection


def eventually(
    what: str, check: Callable[[], T | None], seconds: float = PATIENCE, every: float = 0.05
) -> T:
    """Wait until ``check`` gives something true and return it; say what was missing if not."""
    return wait_for(check, what, seconds, every)


def _tls(base: Path, cluster: Object, user: Object) -> ssl.SSLContext:
    # What stands in the kubeconfig itself ssl reads from files only; no key is left in them.
    with tempfile.TemporaryDirectory() as directory:
        inline = Path(directory)
        authority = _file(base, inline, cluster, "certificate-authority")
        context = ssl.create_default_context(cafile=authority)
        certificate = _file(base, inline, user, "client-certificate")
        if certificate:
            context.load_cert_chain(certificate, _file(base, inline, user, "client-key"))
    return context


def _file(base: Path, inline: Path, fields: Object, name: str) -> Path | None:
    if name in fields:
        return base / str(fields[name])
    if f"{name}-data" in fields:
        (inline / name).write_bytes(base64.b64decode(fields[f"{name}-data"]))
        return inline / name
    return None
