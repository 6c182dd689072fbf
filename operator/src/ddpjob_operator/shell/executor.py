"""Carry out a plan's actions in their order, and record the API's answers.

The reconciler calls it. Every answer goes into the store at once, so that the next plan never acts
on its own stale past. Consecutive deletions, and consecutive creations, go out side by side.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import groupby
from typing import Any

from ddpjob_contract import TOKEN_KEY, crd
from ddpjob_operator.core import actions, render
from ddpjob_operator.core.actions import Body, CreatePod, DeletePod, Refusal, WriteStatus
from ddpjob_operator.core.objects import observe
from ddpjob_operator.core.objects import status as status_
from ddpjob_operator.core.objects.observe import Existing
from ddpjob_operator.core.view import belongs
from ddpjob_operator.shell import nodes, scheduling
from ddpjob_operator.shell.api import (
    JOBS,
    OF_KIND,
    PODS,
    Api,
    ApiError,
    Conflict,
    Invalid,
    NotFound,
    Object,
    find,
)
from ddpjob_operator.shell.store import Store, slim_pod
from ddpjob_operator.shell.telemetry import Metrics, Recorder

log = logging.getLogger(__name__)

_IN_PARALLEL = 32
_TOKEN_BYTES = 32
_NEWEST = 10  # refusals in a row: the wait after the ninth is the longest


class NotLeadingError(Exception):
    """Another operator may act now, so this one has to stop."""


class JobGoneError(Exception):
    """The API server no longer has the job."""


class Executor:
    """``leads()`` is asked before each call; ``now()`` is UTC."""

    def __init__(
        self,
        api: Api,
        store: Store,
        recorder: Recorder,
        metrics: Metrics,
        *,
        leads: Callable[[], bool],
        now: Callable[[], datetime],
    ) -> None:
        self._api, self._store = api, store
        self._recorder, self._metrics = recorder, metrics
        self._leads, self._now = leads, now

    async def carry_out(self, job: observe.Job, todo: Iterable[actions.Action]) -> None:
        """Do all actions, or as many as still make sense.

        Raises ApiError for what only time can cure, JobGoneError, NotLeadingError, and RewoundError
        when etcd was restored from a backup.
        """
        for kind, run in groupby(todo, key=type):
            if kind in (DeletePod, CreatePod):
                goes_on = await self._do_pods(job, list(run))
            else:
                goes_on = all([await self._do(job, action) for action in run])
            if not goes_on:
                return

    async def refresh(self, job: observe.Job) -> None:
        """Read the job again after a write with an unknown outcome."""
        try:
            found = await self._api.get(JOBS, job.namespace, job.name)
        except NotFound as error:
            raise JobGoneError from error
        self._store.put_read_job(found, {job.uid: job.resource_version})

    async def _do(self, job: observe.Job, action: actions.Action) -> bool:
        """Do one action; return False if the rest of the plan is out of date."""
        self._check_leading()
        match action:
            case WriteStatus():
                return await self._write_status(job, action)
            case actions.ConfirmGone():
                return await self._confirm_gone(job, action)
            case actions.ReadNodes(names):
                await nodes.read(self._api, self._store.nodes, names)
            case actions.ReadLeases():
                await self._store.nodes.read_leases(self._api)
            case actions.EnsureWorkload():
                return await self._ensure_workload(job, action)
            case actions.WriteWorkload() | actions.ReadWorkload():
                now = self._now()
                return await scheduling.write_workload(self._api, self._store, job, action, now)
            case actions.DeleteWorkload():
                await scheduling.delete_workload(self._api, self._store, job, action)
            case actions.ReadFlavors(admission, names):
                read = admission, await scheduling.read_flavors(self._api, names)
                self._store.record(job.uid, flavors=read)
            case actions.EnsureNetwork():
                return await self._ensure_network(job, action)
            case actions.RemoveGroups():
                await scheduling.remove_groups(self._api, job, action)
                self._store.record(job.uid, groups_removed=action.name)
            case actions.DeleteJob():
                await self._delete_job(job, action)
        return True

    async def _do_pods(self, job: observe.Job, todo: list[Any]) -> bool:
        """Delete side by side; create one first, then each time one more at once.

        After a refusal no more are begun: most would meet every later pod.
        """
        creating = isinstance(todo[0], CreatePod)
        gate = asyncio.Semaphore(1 if creating else _IN_PARALLEL)
        narrow = _IN_PARALLEL - 1 if creating else 0  # so much wider may the gate become
        refused: list[Refusal] = []
        doubt = asyncio.Lock()  # held while a taken name is looked up: no other creation begins

        async def one(action: CreatePod | DeletePod) -> None:
            nonlocal narrow
            async with gate:
                self._check_leading()
                if isinstance(action, DeletePod):
                    await self._delete_pod(job, action)
                    return
                async with doubt:
                    begins = not refused
                if begins:
                    refusal = await self._create_pod(job, action, doubt)
                    refused.extend([refusal] if refusal else [])
                    if narrow and not refused:
                        narrow -= 1
                        gate.release()

        # Every call ends before the first error is raised: none is cut off half-way.
        for result in await asyncio.gather(*map(one, todo), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if refused:
            self._record_refused(job, refused[0])
        elif creating:
            self._record_created(job)
        return not refused

    def _check_leading(self) -> None:
        if not self._leads():
            raise NotLeadingError

    async def _write_status(self, job: observe.Job, action: WriteStatus) -> bool:
        if action.takes_over:
            self._store.record(job.uid, confirmed=None)
        body = {
            "apiVersion": f"{crd.GROUP}/{crd.VERSION}",
            "kind": crd.KIND,
            "metadata": {
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
            "status": action.status,
        }
        try:
            written = await self._api.replace(JOBS, job.namespace, job.name, body, sub="status")
        except NotFound as error:
            raise JobGoneError from error
        except Invalid as error:
            # Only a correction here or in the CRD helps; the caller backs off.
            log.error("%s/%s: its status is refused: %s (uid %s)", *job.key, error, job.uid)
            raise
        except ApiError as error:
            if error.maybe_done:
                # If the read fails too, no creation relies on older knowledge.
                self._store.record(job.uid, confirmed=None)
            if error.code == 409 or error.maybe_done:
                await self.refresh(job)
                found = self._store.snapshot(job.key)
                if found and (found.job.uid, found.job.status) == (job.uid, action.status):
                    self._report_stored(job, action)  # an answer was lost: aiohttp repeats a PUT
            if error.code != 409:
                raise
            log.info("%s/%s: changed meanwhile, read again (uid %s)", *job.key, job.uid)
            return False
        self._store.put_own_write(written)
        at, stored = self._now(), written.get("status")
        pruned = None if stored == action.status else (action.status, stored or {})
        known = self._store.feedback(job.uid)
        if pruned and not known.pruned:
            log.error("%s/%s: an old or new CRD drops fields of its status", *job.key)
        self._store.record(job.uid, status_written_at=at, pruned=pruned or known.pruned)
        self._report_stored(job, action)
        return True

    def _report_stored(self, job: observe.Job, action: WriteStatus) -> None:
        if action.begins:
            known = self._store.feedback(job.uid)
            self._store.set_feedback(job.uid, known.begin(action.status.get("attempt")))
        self._recorder.send(job, action.events)
        self._metrics.record(job.namespace, action.measurements)
        for event in action.events:
            log.info("%s/%s: %s: %s (uid %s)", *job.key, event.reason, event.message, job.uid)

    async def _delete_job(self, job: observe.Job, action: actions.DeleteJob) -> None:
        try:
            left = await self._api.delete(
                JOBS, job.namespace, job.name, uid=action.uid, version=job.resource_version
            )
        except NotFound as error:
            raise JobGoneError from error
        except Conflict:  # changed meanwhile, another of that name, or a restored etcd
            await self.refresh(job)
            return
        if left.get("kind") != crd.KIND or "deletionTimestamp" not in left["metadata"]:
            raise JobGoneError
        self._store.put_own_write(left)  # a finalizer keeps it: not ours to delete again

    async def _delete_pod(self, job: observe.Job, action: DeletePod) -> None:
        try:
            left = await self._api.delete(
                PODS, job.namespace, action.name, uid=action.uid, grace=action.grace_seconds
            )
        except NotFound:
            left = {}
        except Conflict:
            found = await find(self._api, PODS, job.namespace, action.name)
            if found is not None and found["metadata"]["uid"] == action.uid:
                raise  # not about the uid: another client wrote to the pod at that moment
            left = {}
        except ApiError as error:
            self._record_undeleted(job, action, error)
            raise
        known = self._store.feedback(job.uid).undeleted
        if action.uid in known:
            undeleted = {uid: one for uid, one in known.items() if uid != action.uid}
            self._store.record(job.uid, undeleted=undeleted)
        meta = left.get("metadata") or {}
        stays = meta.get("deletionGracePeriodSeconds") or meta.get("finalizers")
        if left.get("kind") == "Pod" and stays:
            self._store.put_pod(left, from_watch=False)
        else:
            self._store.remove_pod(action.uid)

    def _record_undeleted(self, job: observe.Job, action: DeletePod, error: ApiError) -> None:
        """Keep the first refusal of each pod; a job at its end has no condition for it."""
        known, words = self._store.feedback(job.uid).undeleted, observe.clean(error.message)
        if action.uid in known:
            return
        attempt = job.status.get("attempt", 0)
        refusal = Refusal(attempt, error.code, error.reason, words, self._now())
        there = {pod.uid for pod in self._store.pods_of(job.uid)}
        known = {uid: one for uid, one in known.items() if uid in there} | {action.uid: refusal}
        self._store.record(job.uid, undeleted=known)
        if job.status.get("phase") in crd.TERMINAL_PHASES:
            what = f"pod {action.name} cannot be deleted: {words}"
            self._recorder.send(job, [actions.Event("Warning", "DeletionRefused", what)])

    async def _confirm_gone(self, job: observe.Job, action: actions.ConfirmGone) -> bool:
        at, seen = self._now(), self._store.seen(job.uid, action.attempt)
        selector = f"{crd.LABEL_JOB_UID}={job.uid}"
        if action.seats:
            selector += f",{crd.LABEL_REPLICA} in ({','.join(map(str, sorted(action.seats)))})"
        newest = self._store.newest(PODS.plural)
        listing = await self._api.list_all(PODS, job.namespace, selector, keep=slim_pod)
        self._store.check_list(PODS.plural, listing.resource_version, newest)
        self._store.replace_pods(job.uid, listing.items, listing.resource_version, action.seats)
        # After the pods: a leader that began a newer attempt since then shows here.
        await self.refresh(job)
        now = self._store.snapshot(job.key)
        if now is None or now.job.uid != job.uid or now.job.status.get("attempt") != action.attempt:
            return False
        status, before = status_.from_dict(now.job.status), self._store.feedback(job.uid).confirmed
        read = actions.QuorumRead(
            action.attempt,
            at,
            generation=now.job.generation,
            evicted=action.evicted,
            alone=all(
                p.attempt is not None and p.attempt >= status.min_attempt(p.replica)
                for p in now.pods
            ),
            running=(job.status.get("attempt"), job.status.get("phase"))
            == (action.attempt, "Running"),
            seen=seen,
            replicas=frozenset(
                p.replica for p in now.pods if p.replica is not None and belongs(status, p)
            ),
            begun=before is not None and before.attempt == action.attempt and before.begun,
            seats=action.seats,
            over=status.parked or status.terminal,
        )
        self._store.record(job.uid, confirmed=read)
        return read.alone

    async def _create_pod(
        self, job: observe.Job, action: CreatePod, doubt: asyncio.Lock
    ) -> Refusal | None:
        try:
            pod = await self._api.create(PODS, job.namespace, action.body, strict=True)
        except ApiError as error:
            existing = None
            if error.code == 409:
                async with doubt:
                    name = action.body["metadata"]["name"]
                    found = await find(self._api, PODS, job.namespace, name)
                existing = observe.existing("Pod", found) if found else None
                if existing and found and existing.owner_uid == job.uid:
                    self._store.put_pod(found, from_watch=False)
                    # Without our label no watch shows it: it counts as gone and keeps the name.
                    seen = any(p.uid == existing.uid for p in self._store.pods_of(job.uid))
                    if seen and existing.attempt == action.attempt and not existing.deleting:
                        self._record_seat(job, action)
                        return None
            refusal = self._refusal(job, action.attempt, error, existing)
            self._record_seat(job, action, refusal)
            if error.maybe_done:  # only a quorum list shows the outcome
                self._store.record(job.uid, confirmed=None)
            return refusal
        self._store.put_pod(pod, from_watch=False)
        self._record_seat(job, action)
        if dropped := scheduling.dropped_of(pod, action.body):
            self._record_no_group(job, action.attempt, dropped)
        return None

    def _record_seat(
        self, job: observe.Job, action: CreatePod, refusal: Refusal | None = None
    ) -> None:
        """Keep the newest refusal of each seat in the attempt; None: its pod exists."""
        known = self._store.feedback(job.uid).refusals
        kept = {seat: one for seat, one in known.items() if one.attempt == action.attempt}
        kept.pop(action.replica, None)
        self._store.record(job.uid, refusals=kept | ({action.replica: refusal} if refusal else {}))

    async def _ensure_workload(self, job: observe.Job, action: actions.EnsureWorkload) -> bool:
        refused = await scheduling.ensure_workload(self._api, self._store, job, action)
        if refused is None:
            self._store.record(job.uid, workload_refusal=None)
            self._record_created(job)
            return True
        refusal = self._refusal(job, job.status.get("attempt", 0), *refused)
        self._store.record(job.uid, workload_refusal=refusal)
        self._record_refused(job, refusal)
        return False

    async def _ensure_network(self, job: observe.Job, action: actions.EnsureNetwork) -> bool:
        ensurers = {"Secret": self._ensure_secret, "PodGroup": self._ensure_group}
        for body in action.bodies:
            ensure = ensurers.get(body["kind"], self._ensure)
            refusal = await ensure(job, action.attempt, body)
            if refusal is not None:
                before = self._store.feedback(job.uid).network_refusal
                self._store.record(job.uid, network_refusal=refusal)
                looks = body["kind"] == "PodGroup" and bool(self._store.pods_of(job.uid))
                if refusal.code != 409 and not looks:  # a look creates nothing
                    self._record_refused(job, refusal)
                else:
                    self._log_refusal(job, refusal, before)
                return False
        at = self._now()
        self._store.record(
            job.uid, network_attempt=action.attempt, network_at=at, network_refusal=None
        )
        return True

    async def _ensure_group(self, job: observe.Job, attempt: int, body: Body) -> Refusal | None:
        """Make the attempt's PodGroup; record why if the API cannot give a whole one."""
        try:
            found = await scheduling.ensure_group(self._api, job, body)
        except ApiError as error:
            # With pods there is a group: a right that is gone, or a blink of it, is no loss of it.
            if not scheduling.no_groups(error) or self._store.pods_of(job.uid):
                return self._refusal(job, attempt, error)
            self._record_no_group(job, attempt, observe.clean(error.message))
            return None
        existing = observe.existing(body["kind"], found)
        # Its protection keeps one that another client deletes as long as it has pods.
        going = existing.deleting and not self._store.pods_of(job.uid)
        if existing.owner_uid != job.uid or going:
            taken = Conflict(409, "AlreadyExists", f"PodGroup {existing.name} exists")
            return self._refusal(job, attempt, taken, existing)
        if dropped := scheduling.dropped(found, body):
            self._record_no_group(job, attempt, dropped)
        return None

    def _record_no_group(self, job: observe.Job, attempt: int, why: str) -> None:
        log.warning("%s/%s: no PodGroup: %s (uid %s)", *job.key, why, job.uid)
        self._store.record(job.uid, no_gang=(attempt, why))

    async def _ensure_secret(self, job: observe.Job, attempt: int, body: Body) -> Refusal | None:
        """Make the job's Secret unless it is there; the operator may read none."""
        drawn = {**body, "stringData": {TOKEN_KEY: secrets.token_hex(_TOKEN_BYTES)}}
        try:
            await self._api.create(OF_KIND["Secret"], job.namespace, drawn, strict=True)
        except ApiError as error:
            if error.reason != "AlreadyExists":  # a quota that is written at the time is a 409 too
                return self._refusal(job, attempt, error)
        return None

    async def _ensure(self, job: observe.Job, attempt: int, body: Body) -> Refusal | None:
        kind, name = body["kind"], body["metadata"]["name"]
        resource = OF_KIND[kind]
        error = ApiError(409, "AlreadyExists", f"{kind} {name} already exists")
        found = await find(self._api, resource, job.namespace, name)
        if found is None:
            try:
                await self._api.create(resource, job.namespace, body, strict=True)
                return None
            except ApiError as refused:
                error = refused
            if error.code != 409:
                return self._refusal(job, attempt, error)
            found = await find(self._api, resource, job.namespace, name)
        existing = observe.existing(kind, found) if found else None
        if found and existing and existing.owner_uid == job.uid and not existing.deleting:
            await self._repair(job, found, body)
            return None
        return self._refusal(job, attempt, error, existing)

    async def _repair(self, job: observe.Job, found: Object, body: Body) -> None:
        """Undo changes of other clients: one write, and no other before the next attempt."""
        if (repaired := render.repaired(found, body)) is None:
            return
        kind, name, trouble = body["kind"], body["metadata"]["name"], ""
        try:
            await self._api.replace(OF_KIND[kind], job.namespace, name, repaired)
        except ApiError as error:  # it may do as it is: no reason to hold up the gang
            trouble = str(error)
        self._recorder.send(job, [render.repair_event(f"{kind} {name}", trouble)])

    def _refusal(
        self, job: observe.Job, attempt: int, error: ApiError, existing: Existing | None = None
    ) -> Refusal:
        self._metrics.count_refusal(job.namespace, error.code)
        words, phase = observe.clean(error.message), str(job.status.get("phase", ""))
        answer = (error.code, error.reason, words, self._now())
        return Refusal(attempt, *answer, existing, job.generation, phase)

    def _record_refused(self, job: observe.Job, refusal: Refusal) -> None:
        """Record it in the row of refusals; capacity/refusals.py decides what that delays."""
        before = self._store.feedback(job.uid).refused
        self._store.record(job.uid, refused=(*before, refusal)[-_NEWEST:])
        self._log_refusal(job, refusal, before[-1] if before else None)

    def _record_created(self, job: observe.Job) -> None:
        """End the row of refusals: only a taken name still holds a seat up."""
        known = self._store.feedback(job.uid)
        if known.refused:
            taken = {seat: one for seat, one in known.refusals.items() if one.existing is not None}
            self._store.record(job.uid, refused=(), refusals=taken)

    def _log_refusal(self, job: observe.Job, refusal: Refusal, before: Refusal | None) -> None:
        """Log one line for each row of refusals, however long it grows."""
        if before is None or before.pattern != refusal.pattern:
            what = f"{refusal.code} {refusal.reason}: {refusal.message}"
            log.warning("%s/%s: a creation was refused: %s (uid %s)", *job.key, what, job.uid)
