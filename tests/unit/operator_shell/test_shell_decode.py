"""Decoding what users wrote: in pieces of any size, item by item, and however deep it is nested."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ddpjob_operator.core.objects import compact_spec, observe, spec
from ddpjob_operator.shell.api import loads, read_list, shallow

LIST: dict[str, Any] = {
    "apiVersion": "v1",
    "items": [
        {"metadata": {"name": "a", "note": 'ends in \\"}],{[ and é☃'}},
        {"metadata": {"name": "b"}, "spec": {"text": "x" * 3000, "numbers": [1, -2.5e3, None]}},
        {},
    ],
    "metadata": {"continue": "more", "resourceVersion": "7", "remainingItemCount": 12},
}
#: As the API server writes its own kinds: the items last.
ITEMS_LAST = {name: LIST[name] for name in ("apiVersion", "metadata", "items")}
DEEP = 20_000


async def chunks(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def read(text: str, size: int = 1000) -> tuple[list[Any], dict[str, Any]]:
    return await read_list(chunks(text.encode(), size), lambda item: item)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
@pytest.mark.parametrize("whole", [LIST, ITEMS_LAST], ids=["items first", "items last"])
@pytest.mark.parametrize("indent", [None, 2])
async def test_a_list_is_read_from_pieces_of_any_size(size, whole, indent):
    text = json.dumps(whole, indent=indent, ensure_ascii=False)
    items, rest = await read(text, size)
    assert items == LIST["items"]
    assert rest == {name: LIST[name] for name in ("apiVersion", "metadata")}


async def test_a_list_of_nothing():
    for text in ('{"items":[],"metadata":{}}', '{"items":null,"kind":"PodList","metadata":{}}'):
        items, rest = await read(text, 3)
        assert (items, rest["metadata"]) == ([], {})


async def test_each_item_is_kept_before_the_next_one_has_arrived():
    kept: list[str] = []
    items = [{"name": name, "fill": "x" * 1000} for name in "abcdef"]
    text = json.dumps({"items": items, "metadata": {}})
    sent: list[int] = []

    async def source() -> AsyncIterator[bytes]:
        async for chunk in chunks(text.encode(), 100):
            sent.append(len(kept))
            yield chunk

    await read_list(source(), lambda item: kept.append(item["name"]))
    assert kept == list("abcdef")
    assert sent[len(sent) // 2] >= 2, "half has arrived, and what was whole of it is kept"


async def test_between_two_items_others_have_their_turn(monkeypatch):
    monkeypatch.setattr("ddpjob_operator.shell.api._TURN", 0.0)
    turns: list[int] = []
    kept: list[object] = []
    text = json.dumps({"items": [{"name": n} for n in range(50)], "metadata": {}})
    body = read_list(chunks(text.encode(), len(text)), kept.append)
    task = asyncio.create_task(body)  # type: ignore[arg-type]
    while not task.done():
        turns.append(len(kept))
        await asyncio.sleep(0)
    assert len(set(turns)) > 40


@pytest.mark.parametrize(
    "text", ["", "[]", "nothing", '{"items":[{"a":1}', '{"items":[{"a":}]}', '{"a"', '{"items":[']
)
async def test_what_is_no_list_is_a_value_error(text):
    with pytest.raises(ValueError, match="JSON"):
        await read(text, 2)


def deep(kind: str) -> str:
    return "[" * DEEP + "]" * DEEP if kind == "arrays" else '{"a":' * DEEP + "1" + "}" * DEEP


@pytest.mark.parametrize("kind", ["arrays", "objects"])
@pytest.mark.parametrize("size", [10_000, 1_000_000])
async def test_a_deep_item_of_a_list_is_cut_and_the_others_are_whole(kind, size):
    tail = "]}" * 30_000  # text, also where a piece ends within it
    item = '{"metadata":{"name":"]\\"}"},"spec":{"x":0,"y":[[1],"}"],"z":"' + tail + '"}}'
    text = (
        '{"items":[' + item.replace('"x":0', '"x":' + deep(kind)) + ',{"b":2}],"metadata":{"c":3}}'
    )
    items, rest = await read(text, size)
    assert items[0]["metadata"] == {"name": ']"}'}
    assert items[0]["spec"]["y"] == [[1], "}"]
    assert items[0]["spec"]["z"] == tail
    assert items[1] == {"b": 2}
    assert rest["metadata"] == {"c": 3}


@pytest.mark.fault("U8")
@pytest.mark.parametrize("kind", ["arrays", "objects"])
def test_a_deep_job_is_read_and_refused(kind):
    job = {
        "metadata": {"namespace": "ns", "name": "j", "uid": "u", "generation": 1},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "t"}], "x": 0}}},
        "status": {"phase": "Suspended"},
    }
    text = json.dumps(job).replace('"x": 0', f'"x": {deep(kind)}').encode()
    for found in (loads(text), json.loads(shallow(text))):
        seen = observe.job(found)
        assert seen.status == {"phase": "Suspended"}
        assert "nested too deep" in spec.read(seen.spec).flaw
    value = loads(text)["spec"]["template"]["spec"]["x"]
    while isinstance(value, (list, dict)):
        (value,) = value if isinstance(value, list) else value.values()
    assert math.isnan(value)


def test_what_a_decoder_reads_stays_as_it_is():
    text = json.dumps({"a": [[]] * 1000, "b": '"[' * 1000}).encode()
    assert shallow(text) is text
    assert loads(text) == json.loads(text)


@pytest.mark.fault("U8")
def test_a_template_that_is_too_long_is_not_kept_and_the_cure_is_named():
    env = [{"name": f"N{n}", "value": "v" * 100} for n in range(2000)]
    raw = {"spec": {"containers": [{"name": "trainer", "env": env}]}}
    found = compact_spec.template(raw)
    assert found.packed.data == b""
    read = spec.read({"replicas": 2, "suspend": True, "template": raw})
    assert "ConfigMap" in read.flaw
    assert "spec.template is" in read.flaw
    assert read.suspend, "the rest holds"
    volume = {"nfs": {"path": "x" * 20_000}}
    sound = {"spec": {"containers": [{"name": "trainer"}]}}
    short = spec.read({"template": sound, "snapshot": {"path": "/s", "volume": volume}})
    assert "spec.snapshot.volume is" in short.flaw
