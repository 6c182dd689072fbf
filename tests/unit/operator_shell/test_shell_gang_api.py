"""The API's answers about PodGroups."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ddpjob_operator.shell.api import Forbidden
from ddpjob_operator.shell.scheduling import GangApi


class Closed:
    """An API server whose discovery only some may read (no binding of system:discovery)."""

    async def discover(self, path: str) -> Any:
        raise Forbidden(403, "Forbidden", f"cannot get path {path}")


async def test_discovery_that_is_forbidden_is_an_answer() -> None:
    """The operator does no job's work before it has one."""
    found = GangApi(Closed(), lambda: None)  # type: ignore[arg-type]
    task = asyncio.create_task(found.run())
    try:
        await asyncio.wait_for(found.answered.wait(), 1)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert found.version == ""
