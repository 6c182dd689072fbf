"""Tell a lost peer from a mistake of this process, by a transport's message.

Every exchange between ranks runs in peer_loss(): an error that means a lost peer becomes
PeerLostError, hence exit code 75.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ddpjob_trainer.errors import ConfigError, PeerLostError

#: gloo's and NCCL's messages for a lost peer; they have no exception type for it.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo/transport",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL communicator was aborted",
    "remote process exited",
)
_NO_INTERFACE = "GLOO_SOCKET_IFNAME must name an interface that this machine has"
_OTHER_NCCL = "use the same image on every machine"
#: Messages of a backend for an error that a restart would meet again, with the cure.
_MISCONFIGURED = {
    "Duplicate GPU detected": "give each process its own GPU, that of LOCAL_RANK",
    "Mismatched NCCL version": _OTHER_NCCL,
    "NCCL version mismatch": _OTHER_NCCL,
    "ncclInvalidUsage": "NCCL_DEBUG=WARN tells more",
    "Unable to find address for": _NO_INTERFACE,
    "Unable to find interface for": _NO_INTERFACE,
}
#: Messages for a fault of this process or its GPU; a new process may do better.
_OWN = (
    "ncclInvalidArgument",
    "ncclUnhandledCudaError",
    "out of memory",
    "Cannot allocate memory",
    "shared memory segment",
    "No space left on device",
    "Too many open files",
    "nvmlDevice",
    "doesn't match expected size",
    "op.preamble.length",
)
_LOST_TYPES = (PeerLostError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
#: torch's and this package's code: an error raised there may be the transport's.
_TRANSPORT_CODE = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


def is_peer_loss(error: BaseException) -> bool:
    """Distinguish a transport's complaint about a peer from a mistake in this process."""
    if isinstance(error, PeerLostError):
        return True
    text = str(error)
    if any(words in text for words in (*_MISCONFIGURED, *_OWN)) and "ncclRemoteError" not in text:
        return False
    if isinstance(error, _LOST_TYPES):
        return True
    if not isinstance(error, RuntimeError) or not any(words in text for words in _LOST):
        return False
    # A "Connection refused" of the user's own, from a database say, is no lost peer.
    frames = traceback.extract_tb(error.__traceback__)
    by_torch = bool(frames) and frames[-1].filename.startswith(_TRANSPORT_CODE)
    return by_torch or re.search("gloo|nccl", text, re.IGNORECASE) is not None


def cure_of(error: BaseException) -> str:
    """Return a cure for a backend's complaint that every new process would repeat, else ""."""
    if not isinstance(error, RuntimeError):
        return ""
    return next((cure for words, cure in _MISCONFIGURED.items() if words in str(error)), "")


@contextlib.contextmanager
def peer_loss() -> Iterator[None]:
    """Turn a transport's errors into PeerLostError, or ConfigError."""
    try:
        yield
    except OSError as error:  # of a socket of ours
        raise PeerLostError(f"another rank is gone: {error}") from error
    except RuntimeError as error:
        if cure := cure_of(error):
            raise ConfigError(f"{brief(error)}: {cure}") from error
        if is_peer_loss(error):
            raise PeerLostError(brief(error)) from error
        raise


def brief(error: BaseException) -> str:
    """Return the first line of an error, without gloo's source path and advice."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text)
    text = re.sub(r"^ifa != nullptr\. ", "", text)
    if last := re.search(r"^Last error: *\n?(.+)", str(error), re.MULTILINE):
        text = f"NCCL: {last[1].strip()}"  # the first line names a place in torch's source
    return text.partition(". This is typically")[0][:300]


def leave(code: int) -> NoReturn:
    """End this process at once: its closed sockets notify the peers.

    An orderly exit would run destructors of process groups that may wait for dead peers.
    """
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: a signal handler that interrupted a print must not enter it again.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)
