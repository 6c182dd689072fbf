"""A launcher in the model: the real supervisor, hub and links, over workers that are only counted.

Outside the process are the network (network.py), time, and the workers: they end when the story
says so. step() is one turn of the supervisor's loop, in the order of Supervisor._watch.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

from ddpjob_contract import (
    GROW_AFTER_SECONDS,
    MIN_REPLICAS,
    POD_UID,
    State,
    TerminationReport,
)
from ddpjob_trainer.environment import RESCUE, read_launcher
from ddpjob_trainer.launcher import supervisor
from ddpjob_trainer.launcher.host import Connections
from ddpjob_trainer.launcher.hub import membership
from ddpjob_trainer.launcher.hub.hub import Hub
from ddpjob_trainer.launcher.hub.membership import HubClient
from ddpjob_trainer.launcher.hub.messages import BEAT_SECONDS, Ask, Key, Message
from ddpjob_trainer.launcher.hub.root_cause import Exit
from ddpjob_trainer.launcher.launch_config import LaunchConfig, make_launch_config
from ddpjob_trainer.launcher.local_round import LocalRound, Parked, Running, Succeeded
from ddpjob_trainer.launcher.processes.fork_server import Program
from ddpjob_trainer.launcher.reports import termination
from ddpjob_trainer.launcher.supervisor import Supervisor
from model.cluster import Cluster, Object
from model.network import Line, ModelCalls, ModelClient, Network, Silent
from model.rescues import ModelRescuer, Rescues, Survivor

_PROGRAM = Program("json", (), module=True)
_OURS = Program("ddpjob_trainer", (), module=True)
#: Seconds from one snapshot of a round to the next, in elastic gangs.
SNAPSHOT_SECONDS = 30
_NOWHERE = Path("/nowhere")
_SILENT: Any = Silent()


class Watched(Protocol):
    """Who holds the beginnings of rounds against the invariants."""

    network: Network
    cluster: Cluster
    rescues: bool  # survivors save the newest step
    rescued: Rescues
    least: int  # replicas of an elastic gang; 0: their number is fixed

    def begins(self, launcher: Launcher, key: Key) -> None:
        """A round's workers start."""

    def asks(self, launcher: Launcher) -> None:
        """Its hub has the gang stop, to grow."""


class Workers:
    """The one worker of a launcher, in the place of worker_group.WorkerGroup."""

    def __init__(self, config: LaunchConfig, key: Key) -> None:
        self.key, self._config = key, config
        self.state_dir = _NOWHERE
        self.exits: list[Exit] = []
        self.unkillable: dict[int, str] = {}
        self.running = 0
        self.stopping = self.killed = self.asked = False
        self.kill_at: float | None = None
        self.first_word_by: float | None = None
        self.survivor = Survivor()
        self.began = self.now = 0.0

    @property
    def rank(self) -> int:
        return self._config.rank(0)

    @property
    def pids(self) -> dict[int, int]:
        return dict.fromkeys([self.rank] * self.running, 1)

    @property
    def round(self) -> int:
        return max(0, self.key.round)

    @property
    def failed(self) -> bool:
        return any(exit_.status != 0 and not exit_.ours for exit_ in self.exits)

    @property
    def succeeded(self) -> bool:
        return bool(self.exits) and not self.running and all(e.status == 0 for e in self.exits)

    def state(self, local_rank: int) -> None:
        """It leaves no record."""

    def snapshot_step(self) -> int:
        """Of an elastic gang they are as old as the round's last, by the world's clock."""
        lived = self.now - self.began
        return int(self.now) if self._config.elastic and lived >= SNAPSHOT_SECONDS else -1

    def is_training(self) -> bool:
        return True

    def signal(self, signum: int, now: float) -> None:
        self.asked = True

    def stop(self, now: float, *, last_words: float) -> None:
        self.stopping = True
        self.kill_by(now + last_words)

    def end_all_but(self, chosen: object, now: float, until: float, first_word_by: float) -> None:
        self.stopping, self.first_word_by = True, first_word_by
        self.kill_by(until)

    def kill_by(self, moment: float) -> None:
        self.kill_at = min(self.kill_at or moment, moment)

    def kill_when_due(self, now: float) -> float | None:
        if self.kill_at is None or not self.running:
            return None
        due = min(self.kill_at, self.first_word_by or self.kill_at)
        self.killed |= now >= due
        return due

    def is_gone(self, outliving: object) -> bool:
        return not self.running

    def end(self, status: int, now: float) -> None:
        """The launcher reaps it."""
        ours = self.stopping and status in (-signal.SIGKILL, 143)
        self.running, self.now = 0, now
        self.exits.append(Exit(self.rank, 0, status, now, ours, step=self.survivor.step))


class Launcher(Supervisor):
    """A pod's process. The classes of its parts are for wrong ones."""

    hub_class: type[Hub] = Hub
    client_class: type[ModelClient] = ModelClient

    def __init__(self, world: Watched, pod: Object, now: float) -> None:
        self.pod, self.world = pod, world
        self.uid: str = pod["metadata"]["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.alive, self.stopped = True, False
        self.code = 137  # as long as nobody knows better: it was killed
        self.due: float | None = None
        config = _config(tuple(sorted(self.environment(pod).items())))
        with mock.patch("time.monotonic", return_value=now), _no_threads():
            super().__init__(config)
        self._selector.close()
        nothing = lambda *_: None  # noqa: E731
        self._evidence: Any = SimpleNamespace(begin=nothing, stopped=nothing, follows=nothing)
        self._pump: Any = SimpleNamespace(tail=lambda rank: [])
        self._counted = SimpleNamespace(  # type: ignore[assignment]
            workers=0, round=0, teardown_seconds=0.0, rounds=_Counts(), silent_seconds=0.0
        )
        self._runtime_dir = SimpleNamespace(path=_NOWHERE, metrics=_NOWHERE)  # type: ignore[assignment]
        self._starter: Any = SimpleNamespace(
            begin=self._start,
            prepare=_hush,
            serve=_hush,
            go_on=_hush,
            spares=SimpleNamespace(pids=tuple),
        )
        self._member = self._join(config, now)
        if (hub := self._member.hub) is not None:
            hub.post = functools.partial(self._post, hub.post)
        self._serves = config.hub_port is not None
        self._connections = Connections(None, None)
        if config.replacement:
            self._phase = Parked(self._round(config.first), now)
        else:
            self._begin(config.first, now)

    def environment(self, pod: Object) -> dict[str, str]:
        """As the operator has set it, and its kubelet."""
        told = pod["spec"]["containers"][0]["env"]
        more = {POD_UID: self.uid} | {RESCUE: str(int(self.world.rescues))}
        if self.world.least:
            more |= {MIN_REPLICAS: str(self.world.least), GROW_AFTER_SECONDS: "10"}
        return {one["name"]: one["value"] for one in told if "value" in one} | more

    def _post(self, post: Callable[[int, Message], None], seat: int, message: Message) -> None:
        self.world.rescued.posted(self, seat, message, self._tick)
        if isinstance(message, Ask):
            self.world.asks(self)
        post(seat, message)

    def _join(self, config: LaunchConfig, now: float) -> membership.Membership:
        mine = {"network": self.world.network, "owner": self}
        parts = {
            "HubClient": type("Client", (self.client_class,), mine),
            "Calls": type("Called", (ModelCalls,), mine),
            "Hub": self.hub_class,
            "host": SimpleNamespace(bind=lambda port: _SILENT),
        }
        with mock.patch.multiple(membership, **parts):
            return membership.join(
                config, _SILENT, _hush, lambda: -1, lambda **_: "", now,
                self._newest_snapshot,
            )  # fmt: skip

    # --- The supervisor's parts -----------------------------------------------------------

    def _round(self, key: Key) -> LocalRound:
        workers: Any = Workers(self._config, key)
        send = self._member.link.send
        rescuer = ModelRescuer(workers, _SILENT, send, _hush) if self._config.env.rescue else None
        return LocalRound(
            self._config, workers, self._member, self._ended, self._log.say, rescuer=rescuer
        )

    def _start(self, workers: Workers, now: float, drill: str, reached: int) -> None:
        self.world.begins(self, workers.key)
        workers.running, workers.began = 1, now

    def step(self, now: float) -> None:
        """One turn of its loop."""
        network, member = self.world.network, self._member
        self._tick = now
        if self.workers.running:
            self.workers.now = now
        network.deliver(self, now)
        if isinstance(link := member.link, ModelClient):
            link.dial(now)
        if isinstance(member.calls, ModelCalls):
            member.calls.dial(now)
        if (rescuer := self.rescuer) is not None:
            rescuer.look(now)
        while self._signals.pending:
            self._phase.forward(self._signals.pending.pop(0), now)
        if isinstance(self._phase, Running):
            self._phase = self._phase.report(now)
        due = member.tick(now)
        self._take_messages(now)
        self._phase.stop_the_rest(now)
        self._workers.kill_when_due(now)
        self._report_stopped(now)
        # A beat is always due within a second; only other dues are worth a look.
        self.due = due if due is not None and due > now + BEAT_SECONDS else None
        self.world.rescued.turned(self, now)
        if self._phase.is_over(now):
            with mock.patch.object(termination, "_save", self._write):
                results, ended = self._summary.results, self._ended
                self.code = termination.finish(
                    self._config, self._workers, self._pump, results, ended, [], _hush
                )
            member.close()
            network.kill(self)

    def _write(self, config: LaunchConfig, report: TerminationReport, say: object) -> None:
        """Leave the kubelet a report where one is needed to know which replica has succeeded."""
        if config.env.standby:
            self.world.cluster.last_words[self.uid] = json.dumps(report)

    # --- What others see ------------------------------------------------------------------

    @property
    def workers(self) -> Workers:
        found: Any = self._workers
        return found

    @property
    def rescuer(self) -> ModelRescuer | None:
        found: Any = self._phase.round.rescuer
        return found

    @property
    def config(self) -> LaunchConfig:
        return self._config

    @property
    def replica(self) -> int:
        return self._config.replica

    @property
    def job(self) -> str:
        return self._config.uid

    @property
    def replicas(self) -> int:
        return self._config.replicas

    @property
    def hub(self) -> Hub | None:
        return self._member.hub

    @property
    def door(self) -> Callable[[Line, float], None] | None:
        member = self._member
        listener: Any = member.server._listener if member.server else member.listener
        return listener.meet if listener is not None else None

    @property
    def link_line(self) -> Line | None:
        """Its line to the hub that it follows."""
        link = self._member.link
        found: Any = link._wire if isinstance(link, HubClient) else None
        return found

    @property
    def hub_of(self) -> Launcher | None:
        """The launcher of the hub that it follows."""
        if self.hub is not None:
            return self
        line: Any = self.link_line
        return line.peer.host if line is not None else None

    @property
    def followed(self) -> str:
        """The pod of the hub that it followed last."""
        link = self._member.link
        return link._followed[1] if isinstance(link, HubClient) else self.uid

    @property
    def gang(self) -> list[Launcher]:
        """The launchers that its hub has admitted."""
        hub = self.hub_of
        server = hub._member.server if hub is not None else None
        lines: Any = server._wires.values() if server is not None else ()
        return [line.peer.host for line in lines]

    @property
    def settled(self) -> bool:
        """In a round, with its hub, and nothing waits; or done."""
        if isinstance(self._phase, Succeeded) or self.stands_by:
            return True
        linked = self.hub is not None or self.link_line is not None
        calm = isinstance(self._phase, Running) and not self._phase.waiting_since
        return linked and calm and self.workers.running == 1 and self.due is None

    @property
    def stands_by(self) -> bool:
        """It waits for the loss of another while a round runs."""
        hub = self.hub_of.hub if isinstance(self._phase, Parked) and self.hub_of else None
        return hub is not None and hub.runs and self.due is None

    @property
    def there(self) -> bool:
        """It trains, or has ended well."""
        if self.stands_by:
            return False
        return self.settled if self.alive and not self.stopped else self.code == 0

    def said(self) -> State:
        """Its answer to GET /state."""
        return self._state()

    def fingerprint(self) -> tuple[object, ...]:
        ended, workers, rescuer = self._ended, self.workers, self.rescuer
        return (type(self._phase), workers.key, workers.killed, workers.stopping, workers.kill_at,
                ended.end, ended.lost, self.alive, getattr(self._phase, "reported", 0),
                len(self._member.link.inbox), len(self._signals.pending),
                rescuer.pending if rescuer else 0, workers.first_word_by)  # fmt: skip

    def terminate(self) -> None:
        self._signals.pending.append(signal.SIGTERM)


def _hush(what: object) -> None:
    """Nobody reads it, and there are no spares."""


def _no_threads() -> Any:
    """A day of walks has more launchers than a machine has threads."""
    said = SimpleNamespace(say=_hush, write=lambda *args, **facts: None)
    made = {name: lambda *args: said for name in ("Log", "Events")}
    return mock.patch.multiple(supervisor, Names=lambda *args: _SILENT, **made)


class _Counts(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


@functools.lru_cache(maxsize=256)
def _config(env: tuple[tuple[str, str], ...]) -> LaunchConfig:
    read = read_launcher(dict(env))
    return make_launch_config(read, _OURS if read.elastic else _PROGRAM)
