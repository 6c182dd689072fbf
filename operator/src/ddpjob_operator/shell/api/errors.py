"""Define the API server's errors, as exceptions that callers can tell apart.

Every error of a call becomes one ApiError; no aiohttp exception gets past shell/api/client.py.
"""

# ruff: noqa: N818 - they are named after the API's own reasons

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An unsuccessful call.

    ``code`` is the HTTP status, 0 without an answer: then a write may or may not have happened.
    ``reason`` and ``message`` are those of the Status object; without one the reason is empty and
    the message is the answer's text.
    """

    def __init__(
        self, code: int, reason: str, message: str, retry_after: float | None = None, what: str = ""
    ) -> None:
        answer = f"{code} {reason}".rstrip() if code else "no answer"
        super().__init__(": ".join(part for part in (what, answer, message) if part))
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def maybe_done(self) -> bool:
        """Tell whether the write may have been carried out in spite of the error."""
        return self.code == 0 or self.code >= 500


class Invalid(ApiError):
    """400 or 422: the object itself is wrong, so sending it again cannot help."""


class Forbidden(ApiError):
    """401 or 403: no permission, or a quota or another admission rule refuses."""


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409: a newer resourceVersion, another uid, or the name is taken (AlreadyExists)."""


class Gone(ApiError):
    """410: a watch or a paged list is too old and must start again."""


class Throttled(ApiError):
    """429: surely not carried out; ``retry_after`` says when to try again."""


class Unavailable(ApiError):
    """No answer, or 5xx."""


_BY_CODE: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Throttled,
}


def from_status(
    code: int, status: Mapping[str, Any], *, retry_after: float | None = None, what: str = ""
) -> ApiError:
    """Turn a metav1.Status (or another answer in its place) into an ApiError."""
    cls = _BY_CODE.get(code, Unavailable if code >= 500 or code == 0 else ApiError)
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    return cls(code, reason, message, retry_after=retry_after, what=what)
