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
    ("end", "found"),
    [
        ("raise RuntimeError('CUDA error: uncorrectable ECC error')", (74, "hardware", None)),
        ("nccl_aborts('CUDA error: uncorrectable ECC error')", (74, "hardware", None)),
        ("sys.exit(74)", (74, "hardware", None)),
        ("nccl_aborts('CUDA error: device-side assert')", (134, "signal", 6)),  # the program's own
    ],
)
def test_a_gpu_that_failed_is_not_met_again_in_place(script, tmp_path, end, found):  # type: ignore[no-untyped-def]
    report, own = tmp_path / "report", found[0] == 134
    program = script(f"{ABORT}\nif rank == 1: {end}\ntime.sleep(3600)\n")
    options = NO_ROUNDS if own else ()
    code, _, err = run("--nproc", "2", *options, "--termination-log", str(report), program)
    content = json.loads(report.read_bytes())
    assert (code, content["kind"], content.get("signal")) == found, err
    assert (content["rank"], content["round"]) == (1, 0)
    assert ("no further round: a GPU failed" in err) != own
    assert end.partition("CUDA error: ")[2].partition("'")[0] in content.get("exception", "")


def test_who_nccl_ends_for_a_peer_is_not_the_cause(script, tmp_path):  # type: ignore[no-untyped-def]
    words = "NCCL error: remote process exited or there was a network error"
    program = script(
        f"{ABORT}{after_rank_0(tmp_path)}\nif rank == 0: nccl_aborts({words!r})\nsys.exit(9)\n"
    )
    patient = patched(tmp_path, {"launcher.hub.root_cause.CAUSE_WAIT_SECONDS": PATIENCE})
    code, _, err = run(*NO_ROUNDS, "--nproc", "2", program, env=patient)
    assert code == 9, err
    assert "rank 1 ended first, with exit code 9" in err
