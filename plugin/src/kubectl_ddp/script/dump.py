"""Write an object as YAML without a library: plain data, a script as it is in its file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: No number, in whichever version of YAML: kubectl reads 1e3 as one, PyYAML does not.
_PLAIN = re.compile(r"/?[a-zA-Z][-a-zA-Z0-9._/]+")
_WORDS = {"yes", "no", "on", "off", "true", "false", "null"}
_BLOCK = re.compile(
    r"[\n\x20-\x7e\xa1-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*"
)
#: JSON leaves these as they are, of which YAML takes some for ends of lines.
_ESCAPED = re.compile(r"[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def dumped(value: Mapping[str, Any]) -> str:
    """Format an object."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    found = []
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            first, *rest = _lines(inner)
            if isinstance(inner, (Mapping, list)) and inner:
                first, rest = "", [first, *rest]
            pad = "" if isinstance(inner, list) else "  "
            found += [
                f"{_text(key)}: {first}".rstrip(" "),
                *(pad + one if one else "" for one in rest),
            ]
    elif isinstance(value, list) and value:
        for inner in value:
            first, *rest = _lines(inner)
            found += [f"- {first}", *(f"  {one}" if one else "" for one in rest)]
    elif isinstance(value, str) and "\n" in value and _fits(value):
        body = value.removesuffix("\n")
        how = "-" if body == value else "+" if body.endswith("\n") else ""
        found = [f"|{how}", *(f"  {one}" if one else "" for one in body.split("\n"))]
    else:
        found = [_text(value) if isinstance(value, str) else json.dumps(value)]
    return found


def _fits(value: str) -> bool:
    """Return whether a block holds a text as it is."""
    odd = value.startswith((" ", "\n")) or " \n" in value or value.endswith(" ")
    return not odd and _BLOCK.fullmatch(value) is not None


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
