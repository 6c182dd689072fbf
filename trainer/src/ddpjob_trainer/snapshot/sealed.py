"""JSON that carries its own checksum: the last field is the SHA-256 of all before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def seal(body: Mapping[str, Any]) -> bytes:
    """Return the JSON of a non-empty object with its checksum."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]},"sha256":"{digest}"}}'.encode()


def unseal(data: bytes) -> Any:
    """Return what was sealed. Raises ValueError when a byte of it has changed."""
    end = data.rfind(b',"sha256":"')
    text = data[: max(end, 0)] + b"}"
    if data[end:] != f',"sha256":"{hashlib.sha256(text).hexdigest()}"}}'.encode():
        raise ValueError("it does not match its checksum")
    return json.loads(text)
