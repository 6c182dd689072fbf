"""What a backend's error means: a lost peer, a mistake that no restart cures, or one of this rank.

The texts are those of gloo in torch 2.13, and of torch's and NCCL's libraries.
"""

import pytest
import torch
import torch.distributed as dist

from ddpjob_contract import ExitCode
from ddpjob_trainer.comm.peer_loss import brief, peer_loss
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.training.shutdown import exit_code_of

LOST, CONFIG, OWN = ExitCode.PEER_LOST, ExitCode.BAD_CONFIG, 1
GLOO = "/pytorch/third_party/gloo/gloo/transport/tcp"


def nccl(what: str, name: str, last: str) -> dist.DistBackendError:
    place = "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93"
    text = f"NCCL error in: {place}, {what}, NCCL version 2.28.9\n{name}\nLast error:\n{last}"
    return dist.DistBackendError(text)


USAGE = (
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
)
CUDA = ("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.")
SYSTEM = ("unhandled system error", "ncclSystemError: System call (e.g. socket, malloc) failed")
INTERNAL = ("internal error", "ncclInternalError: Internal check failed.")
REMOTE = (
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error",
)
ARGUMENT = ("invalid argument", "ncclInvalidArgument: Invalid value for an argument.")
NO_SHM = "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
VERSIONS = "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22705"

CASES: list[tuple[BaseException, int]] = [
    (nccl(*USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device ac000"), CONFIG),
    (nccl(*USAGE, VERSIONS), CONFIG),
    (nccl(*ARGUMENT, "Invalid rank requested : 2/2"), OWN),
    (nccl(*CUDA, "Cuda failure 2 'out of memory'"), OWN),
    (nccl(*CUDA, "Failed to CUDA calloc async 4 bytes"), OWN),
    (nccl(*SYSTEM, NO_SHM), OWN),
    (nccl(*SYSTEM, "nvmlDeviceGetHandleByPciBusId() failed: Not Found"), OWN),
    (nccl(*SYSTEM, "Connect to 10.0.0.1<41> failed : Connection refused"), LOST),
    (nccl(*INTERNAL, "Net : Connection closed by remote peer host<50260>"), LOST),
    (nccl(*REMOTE, "Call to recv from 10.0.0.1<33759> failed : Connection reset by peer"), LOST),
    (nccl(*REMOTE, "Cuda failure 2 'out of memory'"), LOST),  # said of an earlier call
    (dist.DistBackendError("NCCL communicator was aborted on rank 1."), LOST),
    (dist.DistNetworkError("failed to recv, got 0 bytes"), LOST),
    (RuntimeError(f"[{GLOO}/pair.cc:537] Read error [::]:1: Connection reset by peer."), LOST),
    (RuntimeError(f"[{GLOO}/unbound_buffer.cc:78] Timed out waiting 10000ms for recv"), LOST),
    (RuntimeError(f"[{GLOO}/device.cc:84] ifa != nullptr. Unable to find address for: x0"), CONFIG),
    (RuntimeError(f"[{GLOO}/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. "), OWN),
    (RuntimeError(f"[{GLOO}/pair.cc:456] Received data size doesn't match expected size."), OWN),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), OWN),
    (RuntimeError("mysql: Connection refused"), OWN),
    (ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), OWN),
    (ValueError("ncclInvalidUsage in a text of the user's"), OWN),
]


@pytest.mark.parametrize(("error", "code"), CASES)
def test_the_exit_code_is_that_of_the_fault(error, code):
    assert exit_code_of(error) == code
    expected = {LOST: PeerLostError, CONFIG: ConfigError}.get(code, type(error))
    with pytest.raises(expected), peer_loss():
        raise error


def test_a_misconfiguration_names_what_nccl_found_and_the_cure():
    with pytest.raises(ConfigError, match=r"NCCL: Duplicate GPU .* its own GPU"), peer_loss():
        raise CASES[0][0]
    assert brief(nccl(*CUDA, "Cuda failure 2 'out of memory'")) == (
        "NCCL: Cuda failure 2 'out of memory'"
    )
