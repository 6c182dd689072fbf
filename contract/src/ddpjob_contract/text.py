"""Make text safe to show: no terminal obeys it, and no URL in it has a password. Pure.

Trainer and plugin use it for what a volume, a container or a library says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote, unquote

HIDDEN: Final = "***"
_SCHEME: Final = re.compile(r"(?:[A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]*")  # chained, as fsspec's
_URL: Final = re.compile(r"""(?<![\w+.:-])[\w+.:-]+://(?:[^\s"'<>]*[^\s"'<>.,:;)\]])?""")
#: Shorter parts of a URL are in many words.
_LEAST: Final = 3


def clean(text: str) -> str:
    """Replace what moves a terminal's cursor, turns letters around or ends the line."""
    return "".join(c if c.isprintable() else "?" for c in text.expandtabs(4))


def without_credentials(text: str, url: str = "") -> str:
    """Hide user, password, query and fragment of each URL in a text.

    ``url``: one that it may quote in part, as errors of libraries do; it may be the text itself.
    """
    shown = dict(_secrets(url)) if url else {}
    if shown:
        longest_first = sorted(shown, key=len, reverse=True)
        known = re.compile("|".join(map(re.escape, longest_first)))
        text = known.sub(lambda found: shown[found[0]], text)
    return _URL.sub(lambda found: _without(found[0]), text)


def _without(url: str) -> str:
    head, rest = _parts(url)
    place, *more = re.split("[?#]", rest, maxsplit=1)
    if "@" in "".join(more):  # of a password that holds a ?, or of a query: nobody can tell
        place = ""
    elif "@" in place:
        place = f"{HIDDEN}@{place.rpartition('@')[2]}"
    return f"{head}{place}{f'?{HIDDEN}' if more else ''}"


def _parts(url: str) -> tuple[str, str]:
    """Return the scheme with its slashes, if there is one, and the rest."""
    head, slashes, rest = url.partition("://")
    return (head + slashes, rest) if slashes and _SCHEME.fullmatch(head) else ("", url)


def _secrets(url: str) -> Iterator[tuple[str, str]]:
    """Yield what a text may quote of a URL, in each way of writing it, and what to show for it."""
    found = {url: _without(url)}
    # Of a chain of URLs, each to the end: a password may hold what parts them.
    for rest in (_parts(url)[1], *(url[at.end() :] for at in re.finditer("://", url))):
        values = re.split("[?#]", rest, maxsplit=1)[1:]
        values += [value for query in values for value in re.split("[#&]", query)]
        values += [value.partition("=")[2] for value in values]
        # By a parser's rules a password has no slash, but users copy theirs as it is.
        for owner in {rest.rpartition("@")[0], re.split("[/?#]", rest)[0].rpartition("@")[0]}:
            user, _, password = owner.partition(":")
            values += [owner, user, password]
            ends = {f"{part}@": f"{HIDDEN}@" for part in (owner, password) if part}
            found = {**ends, **found}
        found = {**dict.fromkeys((one for one in values if len(one) >= _LEAST), HIDDEN), **found}
    for part, shown in found.items():
        quoted = (quote(part, safe, errors="replace") for safe in ("", "/", "@:/?&="))
        for written in (part, unquote(part), *quoted):
            yield written, shown
            yield repr(written)[1:-1], shown
