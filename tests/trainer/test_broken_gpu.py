"""A worker whose GPU fails says so as CUDA and NCCL do; its launcher starts no further round."""

from __future__ import annotations

import json

import pytest

from support.launching import NO_ROUNDS, after_rank_0, run
from support.patience import PATIENCE
from support.rounds import patched

#: As ProcessGroupNCCL's watchdog: to stderr, from C++, then SIGABRT.
ABORT = """
def nccl_aborts(words):
    head = f"[PG ID 0 Rank {rank}] Process group watchdog thread terminated with exception: {words}"
    os.write(2, (head + "\\nframe #0: c10::Error\\n  what():  " + head + "\\n").encode())
    os.abort()
"""


@pytest.mark.fault("N13")
@pytest.mark.parametrize(
    "end",
    [
        "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')",
        "nccl_aborts('CUDA error: uncorrectable ECC error encountered')",
        "sys.exit(74)",
    ],
)
def test_a_gpu_that_failed_is_not_met_again_in_place(script, tmp_path, end):  # type: ignore[no-untyped-def]
    report = tmp_path / "report"
    program = script(f"{ABORT}\nif rank == 1: {end}\ntime.sleep(3600)\n")
    code, _, err = run("--nproc", "2", "--termination-log", str(report), program)
    assert code == 74, err
    assert "no further round: a GPU failed" in err
    content = json.loads(report.read_bytes())
    assert (content["kind"], content["rank"], content["code"]) == ("hardware", 1, 74)
    assert content["round"] == 0
    assert "signal" not in content
    if end != "sys.exit(74)":
        assert "uncorrectable ECC error" in content["exception"]


def test_who_nccl_ends_for_a_peer_is_not_the_cause(script, tmp_path):  # type: ignore[no-untyped-def]
    words = "NCCL error: remote process exited or there was a network error"
    program = script(
        f"{ABORT}{after_rank_0(tmp_path)}\nif rank == 0: nccl_aborts({words!r})\nsys.exit(9)\n"
    )
    patient = patched(tmp_path, {"launcher.hub.root_cause.CAUSE_WAIT_SECONDS": PATIENCE})
    code, _, err = run(*NO_ROUNDS, "--nproc", "2", program, env=patient)
    assert code == 9, err
    assert "rank 1 ended first, with exit code 9" in err


def test_what_nccl_said_of_a_programs_own_fault_is_in_the_report(script, tmp_path):  # type: ignore[no-untyped-def]
    report = tmp_path / "report"
    program = script(f"{ABORT}\nnccl_aborts('CUDA error: device-side assert triggered')\n")
    code, _, err = run(*NO_ROUNDS, "--termination-log", str(report), program)
    assert code == 134, err
    content = json.loads(report.read_bytes())
    assert (content["kind"], content["signal"]) == ("signal", 6)
    assert "device-side assert" in content["exception"]
