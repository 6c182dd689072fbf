"""The informer's patience with a server that calls every version too old."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ddpjob_operator.shell import errors
from ddpjob_operator.shell.api import Api, Listing, Object
from ddpjob_operator.shell.informer import PodInformer
from ddpjob_operator.shell.store import Store

pytestmark = [pytest.mark.looptime]

BOOKMARK: tuple[str, Object] = ("BOOKMARK", {"metadata": {"resourceVersion": "6"}})


class ForgetfulApi:
    """Its watches tell ``events`` and then that the version is too old."""

    def __init__(self) -> None:
        self.lists: list[float] = []
        self.events: list[tuple[str, Object]] = []
        self.listed = asyncio.Event()
        self.gone_lists = False

    async def list_all(self, *_: object) -> Listing:
        self.lists.append(asyncio.get_running_loop().time())
        self.listed.set()
        await asyncio.sleep(0.001)
        if self.gone_lists:
            raise errors.Gone(410, "Expired", "the pages took too long")
        return Listing([], "5")

    async def watch(self, *_: object, **__: object) -> AsyncIterator[tuple[str, Object]]:
        for event in self.events:
            yield event
        raise errors.Gone(410, "Expired", "too old resource version")


@contextlib.asynccontextmanager
async def informing(api: ForgetfulApi) -> AsyncIterator[PodInformer]:
    informer = PodInformer(api, Store(), None, lambda _: None)  # type: ignore[arg-type]
    task = asyncio.create_task(informer.run())
    yield informer
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("gone_lists", [False, True], ids=["watches", "lists"])
async def test_repeated_gone_is_no_storm_of_lists(gone_lists: bool) -> None:
    api = ForgetfulApi()
    api.gone_lists = gone_lists
    async with informing(api):
        await asyncio.sleep(0.1)
        assert len(api.lists) == 2, "the first time it lists again at once"
        await asyncio.sleep(600)
    assert 10 < len(api.lists) < 50, "it goes on, but ever more slowly"


async def test_an_event_ends_the_row() -> None:
    api = ForgetfulApi()
    async with informing(api):
        await asyncio.sleep(60)
        api.events = [BOOKMARK]
        api.listed.clear()
        await api.listed.wait()
        before = len(api.lists)
        await asyncio.sleep(0.1)
    assert len(api.lists) > before + 10, "each watch said something: it lists at once"


def test_the_double_has_the_real_ones_methods() -> None:
    for name in ("list_all", "watch"):
        method: Callable[..., Any] = getattr(Api, name)
        assert callable(method)
