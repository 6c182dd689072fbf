"""Decode JSON from the API server, whatever users have put into it.

client.py and kopf's session (handlers.py) call it. A list is decoded item by item as it arrives, so
that never more than one item is there as dicts, and other tasks run between two items. What is
nested so deep that Python's decoder gives up on it (a DDPJob of 4 KB can be) is replaced by NaN,
which no JSON of Kubernetes holds.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

Object = dict[str, Any]

_DEEPEST = 60  # Kubernetes' own types need less than 20
_SURELY_READ = 500  # brackets
_TURN = 0.01  # seconds of decoding before other tasks run
_SPACE = " \t\r\n,:"
#: Whole strings, for brackets within them are text; a quote alone begins an unfinished one.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[{\]}]')
_decoder = json.JSONDecoder()


def loads(text: str | bytes) -> Any:
    """Decode like json.loads, but cut off what is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_cut(text if isinstance(text, str) else text.decode())[0])


def shallow(text: bytes) -> bytes:
    """Return the JSON unchanged if decoders can read it, else cut the deepest parts."""
    if text.count(b"[") + text.count(b"{") < _SURELY_READ:
        return text
    try:
        json.loads(text)
    except RecursionError:
        return _cut(text.decode())[0].encode()
    return text


async def read_list(
    content: AsyncIterable[bytes], keep: Callable[[Object], Any]
) -> tuple[list[Any], Object]:
    """Decode the body of a list; return what ``keep`` makes of items, and the rest.

    Raises ValueError for anything else (no items are not the same as none left), and for what is no
    JSON, or incomplete.
    """
    text = _Text(content)
    items: list[Any] | None = None
    rest: Object = {}
    await text.expect("{")
    while await text.peek() != "}":
        name = await text.value()
        if name == "items" and await text.peek() == "[":
            await text.expect("[")
            items = []
            while await text.peek() != "]":
                items.append(await text.value(keep))
            await text.expect("]")
        else:
            rest[name] = await text.value()
    if items is None:
        nil = rest.pop("items", ...) is None  # as some servers in Go spell an empty one
        if not (nil and str(rest.get("kind")).endswith("List")):
            raise ValueError(f"no list: it has no items, but {list(rest)}"[:200])
        items = []
    return items, rest


class _Text:
    """JSON that is still arriving, read value by value; commas and colons count as spaces."""

    def __init__(self, content: AsyncIterable[bytes]) -> None:
        self._chunks = content.__aiter__()
        self._bytes = codecs.getincrementaldecoder("utf-8")()
        self._text, self._whole = "", False  # whole: no more will arrive
        self._turn = time.perf_counter()

    async def peek(self) -> str:
        """Return the next character that is no space."""
        while not (text := self._text.lstrip(_SPACE)):
            await self._more(1)
        self._text = text
        return text[0]

    async def expect(self, character: str) -> None:
        """Take that character; ValueError for any other one."""
        if await self.peek() != character:
            raise ValueError(f"no JSON list: {self._text[:80]!r}")
        self._text = self._text[1:]

    async def value(self, keep: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return what ``keep`` makes of the next value."""
        await self.peek()
        while (found := _value(self._text)) is None:
            # Wait for twice as much: each byte is decoded twice at most.
            await self._more(len(self._text))
        self._text = self._text[found[1] :]
        if time.perf_counter() - self._turn > _TURN:
            await asyncio.sleep(0)
            self._turn = time.perf_counter()
        return keep(found[0])

    async def _more(self, characters: int) -> None:
        """Wait for so many characters more, or the end."""
        if self._whole:
            raise ValueError("the JSON ends too early")
        pieces = [self._text]
        while characters > 0 and not self._whole:
            chunk = await anext(self._chunks, b"")
            self._whole = not chunk
            pieces.append(self._bytes.decode(chunk, final=self._whole))
            characters -= len(pieces[-1])
        self._text = "".join(pieces)


def _value(text: str) -> tuple[Any, int] | None:
    """Decode the value at the beginning; return it and its end, None while it is not whole."""
    try:
        found, end = _decoder.raw_decode(text)
    except RecursionError:
        cut, end = _cut(text)
        found = json.loads(cut) if cut else None
    except ValueError:
        return None
    goes_on = end == len(text) and text[0] not in '{["'  # a number
    return None if goes_on or not end else (found, end)


def _cut(text: str) -> tuple[str, int]:
    """Cut what is nested too deep in the first value; return it and its end, 0 if not whole."""
    pieces, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        character = text[token.start()]
        if character in "[{":
            depth += 1
            if depth == _DEEPEST:
                pieces += [text[start : token.start()], "NaN"]
        elif character in "]}":
            if depth == _DEEPEST:
                start = token.end()
            depth -= 1
            if not depth:
                return "".join([*pieces, text[start : token.end()]]), token.end()
        elif token.group() == '"':
            break
    return "", 0


async def lines(content: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines of any length: aiohttp's own iteration fails on those above 128 KiB."""
    pieces: list[bytes] = []
    async for chunk in content:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            whole = b"".join([*pieces, line])
            pieces.clear()
            if whole:
                yield whole
        pieces.append(rest)
