"""`make try`: the demo's manifest on this machine; a process is killed, the weights are the same.

No cluster, no root, no Go: `ddpjob local` starts the launchers of
manifests/examples/digits.yaml on 127.0.0.1. The job trains twice: the first run loses a training
process half-way, by SIGKILL, the second is left alone. What both print at their end is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "manifests" / "examples" / "digits.yaml"
#: The rank that is killed once half of the steps are done.
KILLED = 1
PATIENCE = 900.0
#: Lines that a reader should see: of replica 0 only, as all launchers say the same.
SHOWN = re.compile(
    r" restarting in place| resuming after| is repeated| restart (not )?proven|\] step \d+/"
)
FIRST, SAID_BY = re.compile(r"progress: (http://\S+)"), "[digits-0] "


class TryError(Exception):
    """The runs cannot be compared; the message says why."""


class Job:
    """One run of the manifest, with snapshots in ``folder``; prints its lines of interest."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-m", "ddpjob_tools", "local", str(MANIFEST)]
        command += ["--map", f"/workspace={ROOT}", "--snapshots", str(folder)]
        self.process = subprocess.Popen(
            command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(SAID_BY) and SHOWN.search(line):
                print(f"    {line.removeprefix(SAID_BY).rstrip()}", flush=True)

    def progress(self) -> dict[str, Any]:
        """Return what replica 0 says of the run; empty before it says anything."""
        urls = (url[1] for line in self.lines if (url := FIRST.search(line)))
        try:
            with urllib.request.urlopen(next(urls), timeout=5) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except (StopIteration, OSError, ValueError):
            return {}

    def rank(self, number: int) -> int | None:
        """Return the process of a rank: the one below ours that maps the rank's record."""
        for pid in below(self.process.pid):
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            if f"/rank-{number}.state" in maps:
                return pid
        return None

    def rounds(self) -> int:
        """Return how often all processes were restarted in place, but for drills."""
        found = (line for line in self.lines if SAID_BY in line and "restarting in place" in line)
        return sum("a drill" not in line for line in found)

    def end(self) -> None:
        """Kill the run, whose launchers and ranks die with it."""
        self.process.kill()
        self.process.wait()

    def result(self, deadline: float) -> dict[str, str]:
        """Wait for the end; return the `key=value` lines that the script prints there."""
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        self._reader.join(timeout=5)
        found = dict(re.findall(r"(\w+)=(\S+)$", "\n".join(self.lines), re.MULTILINE))
        if code != 0 or not {"test_accuracy", "weights_sha256"} <= found.keys():
            ended = f"exit code {code}" if code is not None else f"no end in {PATIENCE:.0f} s"
            raise TryError("\n".join([*self.lines[-20:], f"the job did not succeed: {ended}"]))
        return found


def below(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from below(child)
    except OSError:
        return


def kill_half_way(job: Job, deadline: float) -> None:
    """SIGKILL a rank of the job once half of its steps are done."""
    while time.monotonic() < deadline and job.process.poll() is None:
        state = job.progress()
        step, total = state.get("step") or 0, state.get("totalSteps") or 0
        if total and step >= total // 2 and (pid := job.rank(KILLED)) is not None:
            print(f"--- kill -9 {pid}: rank {KILLED}, at step {step} of {total} ---", flush=True)
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def compare(disturbed: dict[str, str], undisturbed: dict[str, str], rounds: int) -> bool:
    """Print both ends side by side; return whether they are one, after a restart."""
    same = disturbed["weights_sha256"] == undisturbed["weights_sha256"]
    print(f"\n  test accuracy              {float(disturbed['test_accuracy']):.2%}")
    print(f"  restarts in place          {rounds} (a process was killed)")
    print(f"  weights, disturbed         sha256 {disturbed['weights_sha256']}")
    print(f"  weights, undisturbed       sha256 {undisturbed['weights_sha256']}")
    print(f"  the two are                {'identical' if same else 'DIFFERENT'}\n")
    return same and rounds > 0


def main() -> int:
    """Return 0 if a process was killed and the weights are identical."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    results: list[dict[str, str]] = []
    rounds: list[int] = []
    with tempfile.TemporaryDirectory(prefix="ddpjob-try-") as folder:
        for name in ("disturbed", "undisturbed"):
            print(f"ddpjob local {MANIFEST.relative_to(ROOT)}    ({name})", flush=True)
            deadline, job = time.monotonic() + PATIENCE, Job(Path(folder, name))
            try:
                if not results:
                    kill_half_way(job, deadline)
                results.append(job.result(deadline))
                rounds.append(job.rounds())
            except (TryError, KeyboardInterrupt) as error:
                print(f"try: {error or 'interrupted'}", file=sys.stderr)
                return 1
            finally:
                job.end()
    ok = compare(results[0], results[1], rounds[0])
    print("Next: make demo (a real cluster; root and Go), or a script of yours:")
    print("  ddpjob init train.py | ddpjob local -")
    print("  (docs/start/your-script.md: `make wheel` and pip install that command)")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
