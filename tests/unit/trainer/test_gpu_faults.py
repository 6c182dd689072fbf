"""Whose fault an end was, by what CUDA, the driver and NCCL say of it."""

import pytest
import torch

from ddpjob_contract import ExitCode
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu.devices import is_fault, judge
from ddpjob_trainer.training.shutdown import exit_code_of

ECC = "CUDA error: uncorrectable ECC error encountered"
NCCL = """\
[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: {}
Exception raised from run at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1901:
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7b99599e31b6 in libc10.so)
frame #1: <unknown function> + 0x9caa4 (0x7b995a69caa4 in /lib/x86_64-linux-gnu/libc.so.6)
"""


def aborted(words: str) -> list[str]:
    """The last lines of a process that NCCL's watchdog has ended."""
    said = NCCL.format(words)
    thrown = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "
    return ["step 17", *(f"[rank1]:[E1123 12:00:00 ProcessGroupNCCL.cpp:2057] {said}{thrown}{said}"
                         ).splitlines()]  # fmt: skip


def test_a_gpu_that_failed_is_told_by_its_words_from_what_the_program_did():
    for text in (
        f"torch.AcceleratorError: {ECC}",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
        "ncclUnhandledCudaError: ... Last error:\nCuda failure 719 'unspecified launch failure'",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA error: system not yet initialized",
        "HIP error: uncorrectable ECC error encountered",
        "Error 802: system not yet initialized",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:1b:00): 94, pid=4711, Contained: SM (0x1). RST: No, D-RST: No",
        "Unable to determine the device handle for GPU0000:1B:00.0: GPU is lost.",
    ):
        assert exit_code_of(RuntimeError(text)) == ExitCode.HARDWARE, text
        assert judge(1, text, ["Traceback (most recent call last):"])[0] == ExitCode.HARDWARE
    for text in (
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA out of memory. Tried to allocate 20.00 GiB",
        "NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, name=python, MMU Fault",
        "the database is lost",
    ):
        assert exit_code_of(RuntimeError(text)) == 1, text
        assert judge(1, text, [text]) == (1, text)
    # An error of another kind is not judged by its words.
    assert issubclass(torch.AcceleratorError, RuntimeError)
    assert exit_code_of(ValueError(ECC)) == 1  # a check of the user's own
    assert exit_code_of(ConfigError(ECC)) == ExitCode.BAD_CONFIG


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA to ask")
def test_the_words_are_those_of_the_cuda_that_torch_came_with():
    """It tells them without a GPU."""
    # DevicesUnavailable, ECC, NVLink, Contained, stack error, LaunchFailure, NotReady, Unknown
    faults = (46, 214, 220, 226, 714, 719, 802, 999)
    # Memory, InitializationError, driver, no device, illegal address, assert, instruction
    others = (2, 3, 35, 100, 700, 710, 715)
    cudart = torch._C._cudart  # type: ignore[attr-defined]
    for code in (*faults, *others):
        text = f"CUDA error: {cudart.cudaGetErrorString(cudart.cudaError(code))}"
        assert is_fault(text) == (code in faults), text


def test_nccl_ends_a_process_and_says_why():
    for words, code in (
        (ECC, ExitCode.HARDWARE),
        ("[Rank 1] Watchdog caught collective operation timeout: Work(9)", ExitCode.PEER_LOST),
        ("NCCL error: remote process exited or there was a network error", ExitCode.PEER_LOST),
        ("CUDA error: device-side assert triggered", -6),  # the program's
    ):
        found, told = judge(-6, "", aborted(words))
        assert (found, words in told) == (code, True), words
    # An end that says what it means is not judged.
    for status in (-9, -11, 3, 75, 76, 64):
        assert judge(status, "ValueError: x", aborted(ECC)) == (status, "ValueError: x")
    assert judge(-6, "", ["Fatal Python error: Aborted"]) == (-6, "")
