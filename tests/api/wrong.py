"""Operators that are wrong on purpose: what the plans do not catch in these they prove nothing.

Each function breaks the program in its own process, before it starts: a planner of the model's
(model.wrong), or a precondition left out on the way to the API server.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.shell import reconciler
from ddpjob_operator.shell.api import client as api
from model import wrong


def skips_the_barrier() -> None:
    """Creates without a quorum's word that the old gang is gone."""
    reconciler.plan = wrong.skips_the_barrier


def deletes_before_the_intent() -> None:
    """Writes the budget after the pods have been deleted."""
    reconciler.plan = wrong.deletes_before_the_intent


def creates_before_the_intent() -> None:
    reconciler.plan = wrong.creates_before_the_intent


def counts_again_after_a_crash() -> None:
    reconciler.plan = wrong.counts_again_after_a_crash


def believes_its_cache() -> None:
    reconciler.plan = wrong.believes_its_cache


def leaves_the_end() -> None:
    reconciler.plan = wrong.leaves_the_end


def deletes_by_name() -> None:
    """A deletion names no uid: whoever has the name now is hit."""
    call = api.Api._call

    async def without(self: api.Api, verb: str, *args: Any, **more: Any) -> Any:
        if verb == "delete":
            resource, path, body = args
            args = (resource, path, {k: v for k, v in body.items() if k != "preconditions"})
        return await call(self, verb, *args, **more)

    api.Api._call = without
