"""A gang by a bare script: the operator's own objects, as fast as the API server takes them.

No status, no intent that survives a crash, no budget, no refusals, no eye for lost events; only
this is kept: no pod is created before all of the old ones are gone. What an operator takes
beyond it is the price of being one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence

from ddpjob_contract import TOKEN_KEY
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from harness.wire import Client, Gone
from support.rest import Object

PATHS = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}


class Script:
    """One gang. ``job`` is a DDPJob as it would be posted; it is not."""

    def __init__(self, client: Client, namespace: str, job: Object) -> None:
        meta = {"namespace": namespace, "name": job["metadata"]["name"], "uid": "0" * 36}
        seen = observe.job({"metadata": {**meta, "generation": 1}, "spec": job["spec"]})
        parsed = spec.read(seen.spec)
        self._client, self._namespace = client, namespace
        self.network = [_own(dict(body)) for body in render.network(seen, parsed)]
        self.marks: dict[str, float] = {}  # when each stage of the restart was over
        self.pods = [_own(render.pod(seen, parsed, 1, r)) for r in range(parsed.replicas)]

    async def create(self) -> None:
        """Everything, until all pods run."""
        await self.create_all(self._client, self._namespace, [self])

    @staticmethod
    async def create_all(client: Client, namespace: str, scripts: Sequence[Script]) -> None:
        """Many gangs at once; one watch for all."""
        path = PATHS["Pod"].format(namespace)
        names = {pod["metadata"]["name"] for script in scripts for pod in script.pods}
        bodies = [body for script in scripts for body in (*script.network, *script.pods)]
        async with contextlib.aclosing(client.watch(path, await client.version(path))) as events:
            posts = asyncio.ensure_future(scripts[0].post(bodies))
            await _until_running(events, names)
        await posts

    async def post(self, bodies: Sequence[Object]) -> None:
        await asyncio.gather(
            *(
                self._client.text("POST", PATHS[body["kind"]].format(self._namespace), body)
                for body in bodies
            )
        )

    async def restart(self, watching: asyncio.Event) -> None:
        """Wait for a pod that fails or goes, replace all, until all run.

        ``watching`` is set as soon as one may. Other gangs' pods are left alone.
        """
        path = PATHS["Pod"].format(self._namespace)
        listing = await self._client.call("GET", path)
        ours = {pod["metadata"]["name"] for pod in self.pods}
        names = ((p["metadata"]["name"], p["metadata"]["uid"]) for p in listing["items"])
        there = {name: uid for name, uid in names if name in ours}
        since = listing["metadata"]["resourceVersion"]
        async with contextlib.aclosing(self._client.watch(path, since)) as events:
            watching.set()
            async for event in events:
                meta, status = event["object"]["metadata"], event["object"]["status"]
                lost = status.get("phase") == "Failed" or "deletionTimestamp" in meta
                if lost and meta["name"] in there:
                    break
            self.marks["noticed"] = time.time()
            calls = [self._delete(path, name, uid) for name, uid in there.items()]
            deletions = asyncio.gather(*calls)
            left = set(there)
            async for event in events:
                if event["type"] == "DELETED":
                    left.discard(event["object"]["metadata"]["name"])
                    if not left:
                        break
            await deletions
            self.marks["old pods gone"] = time.time()
            posts = asyncio.ensure_future(self.post(self.pods))
            await _until_running(events, set(there))
        await posts
        self.marks["new pods run"] = time.time()

    async def _delete(self, path: str, name: str, uid: str) -> None:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 2}
        options["preconditions"] = {"uid": uid}
        with contextlib.suppress(Gone):
            await self._client.text("DELETE", f"{path}/{name}", options)


async def _until_running(events: AsyncGenerator[Object, None], names: set[str]) -> None:
    async for event in events:
        if event["object"]["status"].get("phase") == "Running":
            names.discard(event["object"]["metadata"]["name"])
            if not names:
                return


def _own(body: Object) -> Object:
    """Without its owner, which is not there: the garbage collector would remove it."""
    copy: Object = json.loads(json.dumps(body))
    copy["metadata"].pop("ownerReferences")
    if copy["kind"] == "Secret":
        copy["stringData"] = {TOKEN_KEY: "token"}
    return copy
