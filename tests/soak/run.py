"""The soak: jobs on a real cluster under faults drawn from a seed, for as long as you like.

    make soak-cluster \
        ARGS='--minutes 30 --seed 7 --json tests/soak/soak.json --page tests/soak/soak.md'

Ends with 1 when a run ended in other weights, a job stood still or failed, or an invariant did not
hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from devcluster import Failure
from soak.disturbances import FAULTS, Draw, Stage, broken, draws
from soak.gangs import CLAIM, KINDS, SLOWED, Gang
from soak.record import Hit, Record, page
from support import site as sites
from support.chronicle import Chronicle
from support.cluster import ROOT, wait_for
from support.rest import Rest, RestError
from support.site import Site

NAME = "t-soak"
_FROZEN = 600.0  # seconds after a fault is over in which each job must have trained on
_TROUBLE = (
    OSError, RestError, AssertionError, Failure, http.client.HTTPException,
    subprocess.SubprocessError,
)  # fmt: skip


@dataclass
class Soak:
    """``baseline``: the runs before the first fault, which say what is right."""

    stage: Stage
    chronicle: Chronicle
    record: Record
    began: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f}] {line}", flush=True)

    def wrong(self, what: str) -> None:
        self.say(f"WRONG: {what}")
        self.record.wrong.append(what)

    # --- jobs -----------------------------------------------------------------------------

    def baseline(self) -> None:
        """Each kind once, undisturbed, all side by side."""
        for gang in self.stage.gangs:
            gang.begin()
        for gang in self.stage.gangs:
            run = wait_for(gang.tick, f"the undisturbed run of {gang.kind.name}", 900)
            assert run.phase == "Succeeded", gang.site.explain(gang.name)
            assert gang.reference, "no weights"
            self.say(f"{run.name}: {run.seconds:.0f} s, {gang.reference}")

    def tend(self, gang: Gang, last: bool) -> None:
        """Judge a run that has ended and begin the next one."""
        run = gang.tick()
        if run is None and gang.runs[-1].phase == "":
            return
        if run is not None and gang.number > 1:
            self.say(f"{run.name} {run.phase}, {run.seconds:.0f} s, {run.attempts} attempts,"
                     f" {dict(run.restarts)}, weights {run.weights}")  # fmt: skip
            self.record.runs.append(asdict(run))
            if run.phase != "Succeeded" or run.weights != "equal":
                self.wrong(f"{run.name} {run.phase}, weights {run.weights}")
                self.say(gang.site.explain(run.name))
        if not last:
            gang.remove()
            gang.begin()

    def tend_all(self) -> None:
        """In a thread: until the soak ends."""
        while not self.ended.wait(0.3):
            with suppress(Failure):  # it ended at once: again in a moment
                if self.stage.plane.supervise():
                    self.say("the scheduler had ended by itself, and is started again")
            for gang in self.stage.gangs:
                try:
                    self.tend(gang, last=False)
                except _TROUBLE:
                    continue  # the API server is away: again in a moment
                except Exception as error:
                    traceback.print_exc()
                    self.wrong(f"the soak itself: {error!r}")

    # --- faults ---------------------------------------------------------------------------

    def disturb(self, draw: Draw) -> Hit:
        """One fault, what comes on top of it, and the wait until everybody trains on."""
        alone = FAULTS[draw.kind].alone
        concerned = [self.stage.gangs[draw.gang]] if alone else list(self.stage.gangs)
        now = time.monotonic()
        target = f"{self.stage.gangs[draw.gang].name} replica {draw.replica}"
        hit = Hit(draw.kind, round(now - self.began, 1), target if alone else "all")
        more = f", then {draw.second.kind}" if draw.second else ""
        self.say(f"{draw.kind}: {hit.target}, for {draw.hold:.0f} s{more}")
        try:
            with broken(self.stage, draw):
                began = time.monotonic()
                # Steps that were on their way when it hit may still be finished.
                at = {g.kind.name: g.position for g in self.stage.gangs}
                reached = {kind: (run, step + 2) for kind, (run, step) in at.items()}
                self._on_top(draw, hit, began)
                time.sleep(max(0.0, began + draw.hold - time.monotonic()))
                hit.held = round(time.monotonic() - began, 1)
        except _TROUBLE as error:
            hit.missed = str(error)[:300]
            self.say(f"missed: {hit.missed}")
            return hit
        whom = self.stage.gangs if draw.second else concerned

        def on() -> bool | None:
            return all(gang.position > reached[gang.kind.name] for gang in whom)

        try:
            wait_for(on, "all to train on", _FROZEN)
            self.say("  all train on")
        except AssertionError:
            self.wrong(f"{draw.kind} at {hit.at:.0f} s: not all train on")
            for gang in whom:
                self.say(gang.site.explain(gang.name))
        return hit

    def _on_top(self, draw: Draw, hit: Hit, began: float) -> None:
        if draw.second is None:
            return
        while time.monotonic() < began + min(draw.wait, draw.hold + 3):
            time.sleep(0.1)
        hit.second = draw.second.kind
        with suppress(*_TROUBLE), broken(self.stage, draw.second):
            pass

    def check(self) -> None:
        """Hold what the watch has told since the last time against the invariants."""
        try:
            for what in self.chronicle.violations(60):
                self.wrong(str(what))
        except AssertionError as error:
            self.say(f"not checked now: {error}")
        self.record.writes, self.record.gaps = self.chronicle.writes, self.chronicle.gaps


# --- The cluster --------------------------------------------------------------------------


@contextmanager
def small_volume(megabytes: int) -> Iterator[Path]:
    """A disk that can be filled. It is there before the nodes, so that they see it."""
    with tempfile.TemporaryDirectory(prefix="ddpjob-soak-") as directory:
        size = f"size={megabytes}m,mode=777"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "soak", directory], check=True)
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def furnish(site: Site, volume: Path) -> None:
    """The claim on the small volume, and the script that slows examples down."""
    size = {"storage": "1Gi"}
    spec = {
        "capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": "",
        "hostPath": {"path": str(volume)},
        "claimRef": {"namespace": site.namespace, "name": CLAIM},
    }  # fmt: skip
    claim = {
        "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": site.namespace,
        "resources": {"requests": size},
    }  # fmt: skip
    site.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": site.namespace},
         "spec": spec},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM},
         "spec": claim},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": SLOWED},
         "data": {sites.SLOW.name: sites.SLOW.read_text()}},
    )  # fmt: skip


def play(soak: Soak, args: argparse.Namespace) -> None:
    """Faults until the time is over; then whatever runs is let end."""
    soak.baseline()
    soak.began = time.monotonic()
    tender = threading.Thread(target=soak.tend_all, daemon=True)
    tender.start()
    for draw in draws(args.seed, len(soak.stage.gangs)):
        if time.monotonic() > soak.began + 60 * args.minutes:
            break
        hit = soak.disturb(draw)
        soak.record.hits.append(hit)
        soak.check()
        save(soak.record, args)
        time.sleep(draw.rest)
    soak.ended.set()
    tender.join()
    soak.say("time is over: the last runs are let end")
    for gang in soak.stage.gangs:

        def over(gang: Gang = gang) -> bool | None:
            with suppress(*_TROUBLE):
                soak.tend(gang, last=True)
            return bool(gang.runs[-1].phase)

        try:
            wait_for(over, f"{gang.name} to end", 600)
        except AssertionError as error:
            soak.wrong(str(error))
    soak.check()
    for what in soak.chronicle.orphans():
        soak.wrong(what)


def save(record: Record, args: argparse.Namespace) -> None:
    found = asdict(record)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.page:
        args.page.write_text(page(found, {name: fault.what for name, fault in FAULTS.items()}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="of faults (30)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="which faults (random)")
    parser.add_argument("--json", type=Path, help="what was seen goes there")
    parser.add_argument("--page", type=Path, help="and there, as a page of docs/")
    return parser.parse_args()


def main() -> int:
    args = parse()
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    record = Record(args.seed, args.minutes, commit, datetime.now(UTC).date().isoformat())
    print(f"seed {args.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # taking the cluster down
    with small_volume(256) as volume, sites.installed(NAME) as site:
        furnish(site, volume)
        with Chronicle(Rest(site.cluster.kubeconfig), site.namespace) as chronicle:
            chronicle.state.deposed = True  # one that wakes up believes to lead
            gangs = [Gang(kind, site, chronicle, volume) for kind in KINDS]
            soak = Soak(Stage(site, gangs, volume), chronicle, record)
            try:
                play(soak, args)
            except Exception as error:
                traceback.print_exc()
                soak.wrong(f"the soak itself: {error!r}")
            save(record, args)
    print(f"{len(record.hits)} faults, {len(record.runs)} runs, {len(record.wrong)} wrong")
    return 1 if record.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
