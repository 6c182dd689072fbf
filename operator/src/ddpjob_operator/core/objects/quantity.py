"""Convert quantities of Kubernetes to numbers, for compact_spec.py."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(
    r"\+?(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE]))?"
)
_DECIMAL: Final = dict(zip("num kMGTPE", range(-9, 19, 3), strict=True))
_BINARY: Final = {f"{letter}i": 1 << 10 * n for n, letter in enumerate(" KMGTPE") if n}


def number(quantity: object) -> Decimal | None:
    """Read a quantity, such as 100m, 1.5Gi or 2e3; None if it is none."""
    found = _QUANTITY.fullmatch(str(quantity)[:32])
    if found is None:
        return None
    value, exponent, unit = Decimal(found[1]), found[2], found[3] or " "
    if exponent:
        return value.scaleb(int(exponent))
    return value * _BINARY[unit] if unit in _BINARY else value.scaleb(_DECIMAL[unit])
