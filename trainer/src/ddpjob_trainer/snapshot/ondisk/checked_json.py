"""Write and read JSON of bounded size; seal() puts a SHA-256 at the end.

Writing has the bounds of reading, so nothing is called durable that could never be read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Some 100 000 ranks' parts fit in. Reading that much takes less than 1 GB.
MAX_BYTES = 64 << 20
_MAX_VALUES = 2 << 20


def dumps(value: Any) -> bytes:
    """Return JSON that loads() takes. Raises ValueError when it is too large."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    check(data)
    return data


def loads(data: bytes) -> Any:
    """Read JSON from a stranger. Raises ValueError."""
    check(data)
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def count(value: Any, least: int = 0) -> int:
    """Return a whole number that fits into 63 bits. Raises ValueError for anything else."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def check(data: bytes) -> None:
    """Raise ValueError for what would take too much memory to read.

    A list in brackets takes 3 bytes of text and 20 times as much in memory; a letter beyond ASCII
    makes all others as wide as itself.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"names and numbers take {len(data)} bytes, at most {MAX_BYTES} can be")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > _MAX_VALUES:
        raise ValueError(f"{values} names and numbers, at most {_MAX_VALUES} can be")
    if not data.isascii():
        raise ValueError("JSON that is not plain ASCII")


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a non-empty object with its checksum. Raises ValueError."""
    text = dumps(body)
    digest = hashlib.sha256(text).hexdigest().encode()
    data = text[:-1] + b',"sha256":"' + digest + b'"}'
    check(data)
    return data


def unseal(data: bytes) -> Any:
    """Return what was sealed. Raises ValueError when a byte of it has changed."""
    check(data)
    end = data.rfind(b',"sha256":"')
    text = data[: max(end, 0)] + b"}"
    if data[end:] != f',"sha256":"{hashlib.sha256(text).hexdigest()}"}}'.encode():
        raise ValueError("it does not match its checksum")
    return loads(text)
