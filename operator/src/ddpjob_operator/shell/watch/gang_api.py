"""Find out which version of the API serves PodGroups, if one does.

app.py runs it; the reconciler hands the answer to plan(). An administrator may switch the API on or
off while the operator runs: then ``changed()`` is called, and all jobs are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ddpjob_operator.core.pod_groups import GROUP, WHOLE
from ddpjob_operator.shell.api import errors
from ddpjob_operator.shell.api.client import PODGROUPS, Api

log = logging.getLogger(__name__)

_EVERY = 60.0
_RETRY = 2.0


class GangApi:
    """``version``: of scheduling.k8s.io, "" without PodGroups; ``answered`` once that is known."""

    def __init__(self, api: Api, changed: Callable[[], None], seconds: float = _EVERY) -> None:
        self._api, self._changed, self._seconds = api, changed, seconds
        self.version = ""
        self.answered = asyncio.Event()

    async def run(self) -> None:
        """Ask until cancelled; while the API server does not answer, keep what it said last."""
        while True:
            delay = _RETRY
            with contextlib.suppress(errors.ApiError):  # others log that it is away
                found = await self._find()
                delay = self._seconds
                if found != self.version:
                    log.info("PodGroups: %s", f"{GROUP}/{found}" if found else "not served now")
                    self.version = found
                    self._changed()
                self.answered.set()
            await asyncio.sleep(delay)

    async def _find(self) -> str:
        try:
            groups = (await self._api.discover("/apis")).get("groups", ())
        except errors.Forbidden:
            return ""  # by an administrator, who has taken the binding of system:discovery away
        versions = (one["versions"] for one in groups if one["name"] == GROUP)
        served = {one["version"] for one in next(versions, ())}
        for version in WHOLE:
            if version not in served:
                continue
            kinds = await self._api.discover(f"/apis/{GROUP}/{version}")
            if any(one["name"] == PODGROUPS for one in kinds.get("resources", ())):
                return version
        return ""
