"""Launchers keep each failure's story beside the snapshots, whatever the disk there does."""

import json
import os
from pathlib import Path
from typing import Any

from support.launching import NO_ROUNDS, finished, run
from support.patience import PATIENCE, wait_for
from support.rounds import UNHURRIED, patched, two_launchers

#: New lines are looked for at once, and often.
OFTEN = {
    "launcher.reports.evidence._FIRST_SECONDS": 0.05,
    "launcher.reports.evidence._EVERY_SECONDS": 0.05,
    "launcher.reports.evidence._PATIENCE_SECONDS": PATIENCE,
}
LIVES = """
life = os.environ["DDPJOB_ROUND"]
print(f"rank {rank} lives in round {life}", flush=True)
if life == "0" and rank == 3:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.02)
"""


def evidence(*words: object) -> str:
    """What `ddpjob-trainer evidence` prints, without any launcher."""
    code, out = finished("-m", "ddpjob_trainer", "evidence", *words)
    assert code == 0, out
    return out


def rounds(where: Path) -> list[dict[str, Any]]:
    """All rounds, newest first."""
    found: list[dict[str, Any]] = json.loads(evidence("ls", "--json", where))["incidents"]
    return found


def test_after_a_killed_rank_and_a_killed_launcher_all_is_readable(script, tmp_path):
    where = tmp_path / "snapshots"
    env = {**patched(tmp_path, {**OFTEN, **UNHURRIED}), "DDPJOB_SNAPSHOT_DIR": str(where)}
    words = ("--spares", "0", script(LIVES))
    with two_launchers(tmp_path, *words, nproc=2, **env) as (hub, other):

        def lives() -> bool:
            files = list(where.glob("evidence/attempt-1-round-1-*/replica-1.json"))
            return any("rank 3 lives in round 1" in path.read_text() for path in files)

        wait_for(lives, "the last lines of the launcher that is killed next")
        other.kill()
        said = hub.communicate(timeout=PATIENCE)[1]
    newest, oldest = rounds(where)
    assert (oldest["attempt"], oldest["round"]) == (1, 0)
    first = oldest["first"]
    assert (first["rank"], first["end"], first["signal"]) == (3, "failed", 9), said
    assert first["log"] == ["rank 3 lives in round 0", "last words"]
    assert (oldest["failed"], oldest["stopped"]) == ([3], [0, 1, 2])
    assert oldest["cause"]["rank"] == 3
    assert newest["lost"] == {"1": "was lost"}
    assert newest["running"] == [2, 3]
    assert (newest["first"]["rank"], newest["first"]["end"]) == (2, "running")
    shown = evidence("show", "--attempt", 1, "--round", 1, "--rank", 3, where).splitlines()
    assert shown[1:] == ["--- rank 3: running, its end was not written", "rank 3 lives in round 1"]
    row = evidence("ls", where).splitlines()[1]
    assert row.split(maxsplit=4)[4].split("  ")[0] == "rank 3 (signal 9)"
    assert row.endswith("  stopped: 0, 1, 2")


HANGS = """
from pathlib import Path
from ddpjob_trainer.liveness import heartbeat, stacks
directory = Path(os.environ["DDPJOB_TRAINER_STATE_DIR"])
stacks.enable(directory, rank)
writer = heartbeat.RankStateWriter(directory, rank)
def asleep():
    while True:
        time.sleep(3600)
writer.update(phase="step", step=7)
writer.mark("data" if rank == 1 else "backward")
asleep()
"""


def test_a_hang_leaves_stacks_also_native_ones_and_the_flight_recorder(script, tmp_path):
    where, programs = tmp_path / "snapshots", tmp_path / "programs"
    programs.mkdir()
    spy = programs / "py-spy"
    spy.write_text('#!/bin/sh\n[ "$1 $2 $3" = "dump --native --pid" ] && echo "native of $4"\n')
    spy.chmod(0o755)
    report = tmp_path / "report"
    env = {
        **patched(tmp_path, {**OFTEN, "launcher.hangs.SECONDS": PATIENCE}),
        "DDPJOB_SNAPSHOT_DIR": str(where),
        "DDPJOB_HANG_STEP_SECONDS": "1.5",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "trace_"),
    }
    dumps = 'open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + str(rank), "w").write("dump")\n'
    words = (*NO_ROUNDS, "--nproc", "3", "--termination-log", str(report), script(dumps + HANGS))
    code, _, err = run(*words, env=env)
    assert code == 76, err
    (found,) = rounds(where)
    assert (found["first"]["code"], found["stacks"]) == (76, [0])
    assert found["flight"] == [f"rank-{n}.nccl.gz" for n in range(3)]
    shown = evidence("show", where)
    assert shown.count("in asleep") == 3
    assert shown.count("by py-spy\nnative of ") == 3
    assert f"--- rank {found['first']['rank']}, by py-spy" in err
    assert json.loads(report.read_bytes())["kind"] == "hang"


PRINTS = """
for step in range(1, 6):
    loss = 8 / step if os.environ["DDPJOB_ROUND"] == "0" else 1 / step
    print(f"step {step} loss: {loss}" + f", acc={step}" * (step > 2), flush=True)
    time.sleep(0.6)
sys.exit(os.environ["DDPJOB_ROUND"] == "0")
"""


def test_each_round_keeps_its_curves(script, tmp_path):
    """Of any program, as it was read from its lines."""
    where = tmp_path / "snapshots"
    env = {**patched(tmp_path, OFTEN), "DDPJOB_SNAPSHOT_DIR": str(where)}
    words = ("--spares", "0", "--read", "acc=acc=(.*)", script(PRINTS))
    code, _, err = run(*words, env=env)
    assert code == 0, err
    newest, oldest = (one["curves"] for one in rounds(where))
    assert oldest["loss"][-1] == [5, 1.6]
    assert newest["loss"][-1] == [5, 0.2]
    assert newest["acc"][-1] == [5, 5]
    assert all(loss == float(f"{1 / step:.6g}") for step, loss in newest["loss"])
    assert all(step == value for step, value in newest["acc"]), "none of the round before"


FAILS_ONCE = """
if os.environ["DDPJOB_ROUND"] == "0":
    if rank == 1:
        raise ValueError("boom")
    time.sleep(3600)
"""


def test_an_attempt_that_ends_uploads_what_its_disk_has(script, tmp_path):
    """As with an emptyDir, which goes with the pod."""
    store = f"file://{tmp_path}/store"
    env = {
        "DDPJOB_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "DDPJOB_TRAINER_SNAPSHOT_UPLOAD": store,
        **patched(tmp_path, {"launcher.reports.evidence._UPLOAD_SECONDS": PATIENCE}),
    }
    code, _, err = run(*NO_ROUNDS, "--nproc", "3", script(FAILS_ONCE), env=env)
    assert code == 1, err
    row = evidence("ls", store).splitlines()[1]
    assert "rank 1 (exit code 1: ValueError: boom)" in row
    env["DDPJOB_TRAINER_SNAPSHOT_UPLOAD"] = "nothing://x"
    code, _, err = run(*NO_ROUNDS, "--nproc", "3", script(FAILS_ONCE), env=env)
    assert code == 1
    assert "were not uploaded to nothing://x: " in err
    assert "nothing" in err
