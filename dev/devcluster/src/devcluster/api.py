"""A client of the API server that needs nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from devcluster import Failure
from devcluster.layout import Layout

#: Of a request that is not asked again when no answer comes in time.
_ONCE_SECONDS = 60.0


class ApiError(Exception):
    """The API server's refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Api:
    """The cluster's API, as administrator; a connection per request."""

    address: str
    context: ssl.SSLContext

    def _open(self, method: str, path: str, body: Any, timeout: float) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection(
            self.address, 6443, timeout=timeout, context=self.context
        )
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": content, "Accept": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, body=data, headers=headers)
        return connection.getresponse()

    def request(self, method: str, path: str, body: Any = None, timeout: float = 5.0) -> Any:
        """Return the reply's object, or its text when it is none; ApiError for 400 and above."""
        response = self._open(method, path, body, timeout)
        text = response.read().decode(errors="replace")
        response.close()
        try:
            reply = json.loads(text)
        except ValueError:
            reply = text
        if response.status >= 400:
            message = reply.get("message", text) if isinstance(reply, dict) else text
            raise ApiError(response.status, message.strip())
        return reply

    def get(self, path: str) -> Any:
        """GET; for those who ask again."""
        return self.request("GET", path)

    def items(self, path: str) -> list[dict[str, Any]]:
        """Return what a list has; for those who ask once."""
        found: list[dict[str, Any]] = self.request("GET", path, timeout=_ONCE_SECONDS)["items"]
        return found

    def ensure(self, collection: str, manifest: dict[str, Any]) -> None:
        """Create an object unless it is there."""
        try:
            self.request("POST", collection, manifest, _ONCE_SECONDS)
        except ApiError as error:
            if error.status != 409:
                raise

    def delete(self, path: str) -> None:
        """Delete an object if it is there."""
        try:
            self.request("DELETE", path, timeout=_ONCE_SECONDS)
        except ApiError as error:
            if error.status != 404:
                raise

    def watch(self, collection: str, version: str, seconds: int) -> Iterator[dict[str, Any]]:
        """Yield watch events after ``version`` for ``seconds``."""
        query = f"watch=1&resourceVersion={version}&timeoutSeconds={seconds}"
        response = self._open("GET", f"{collection}?{query}", None, seconds + 5)
        try:
            while line := response.readline():
                yield json.loads(line)
        finally:
            response.close()

    def find(self, path: str) -> Any:
        """GET; None where there is no such thing, or no answer. For those who ask again."""
        with contextlib.suppress(OSError, http.client.HTTPException, ApiError):
            return self.get(path)
        return None


def connect(layout: Layout) -> Api:
    """Return the client for a cluster whose certificates exist."""
    try:
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        context.load_cert_chain(layout.pki / "admin.crt", layout.pki / "admin.key")
    except OSError as error:
        raise Failure(f"cluster {layout.name} has no certificates: run `devcluster up`") from error
    return Api(layout.gateway, context)
