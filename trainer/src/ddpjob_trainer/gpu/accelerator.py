"""Compute on CUDA's streams and memory, or on a CPU in their place.

Loop and the snapshots call it. A CPU has done its work when a call returns. A GPU queues it, and
reading a result waits for all that was queued before. So results are copied to the host beside the
work and read when they are needed, a step later at best. All such calls are in this file, which
keeps the tests' substitute small.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch

from ddpjob_trainer.errors import ConfigError, HardwareError
from ddpjob_trainer.gpu import devices

#: A number that the host knows, or a tensor of one element on the device.
Number = float | torch.Tensor

_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3
#: NCCL's variables that do not affect bits.
_NCCL_OTHER = ("NCCL_DEBUG", "NCCL_SOCKET", "NCCL_IB", "NCCL_NET", "NCCL_CONF", "NCCL_COMM_ID")
#: torch's reasons for missing CUDA that are the same on every node.
_SETUP = ("sees none", "not compiled", "no NVIDIA driver", "driver on your system is too old")


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order, shape (n,), in its own memory if possible."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # For a single element torch keeps any stride, and then shows no bytes.
    return flat.as_strided(flat.shape, (1,))


class Reading:
    """Numbers being copied to the host."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._host = vector

    def values(self) -> list[float]:
        """Wait for the numbers and return them."""
        found: list[float] = self._host.tolist()
        return found


@dataclass(frozen=True, slots=True)
class Read:
    """One number of a Reading, which float() waits for."""

    reading: Reading
    index: int

    def __float__(self) -> float:
        return self.reading.values()[self.index]


class Accelerator:
    """A CPU: work is done when the call returns."""

    queues = False  # whether work is done after the call returns

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter(self) -> None:
        """Bind a new thread to this device, else CUDA would use the first."""

    def name(self) -> str:
        """Return a name unique to one process of a run; "": it may be shared."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return facts besides the type that affect bits, as plain values for JSON."""
        return {}

    def number(self, tensor: torch.Tensor) -> Number:
        """Return the present value of a tensor of one element in double precision."""
        return float(tensor)

    def numbers(self, values: Sequence[Number]) -> torch.Tensor:
        """Put numbers into one float64 vector on the device."""
        return torch.tensor(values, dtype=torch.float64)

    def read(self, vector: torch.Tensor, work: Any = None) -> Reading:
        """Copy a vector to the host. ``work``: the collective that computes it, if any."""
        if work is not None:
            work.wait()
        return Reading(vector)

    def soon(self, values: Mapping[str, SupportsFloat]) -> Mapping[str, SupportsFloat]:
        """Copy the tensors among these to the host."""
        measured = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        if not self.queues or not measured:
            return values
        tensors = [values[name] for name in measured]
        reading = self.read(self.numbers([self.number(t) for t in tensors]))  # type: ignore[arg-type]
        return {**values, **{name: Read(reading, i) for i, name in enumerate(measured)}}

    def mark(self) -> Any:
        """Return a torch.Event behind all queued work; None without a queue."""
        return None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Run copies to the device in the block beside earlier work, before later work."""
        yield

    def loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device; within loading()."""
        return tensor

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in memory from which loaded() need not wait."""
        return tensor

    @contextlib.contextmanager
    def saving(self, ready: Any) -> Iterator[None]:
        """Begin the block's copies to the host at a mark; wait for them."""
        yield

    def pin(self, memory: torch.Tensor) -> bool:
        """Let copies run beside the device's work; return whether unpin() must follow.

        Raises RuntimeError where it is impossible.
        """
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo pin()."""

    def release(self) -> None:
        """Free memory that is cached in other sizes than will be needed."""


class Cuda(Accelerator):
    """One GPU, that of this process."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in, self._out, self._model = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self._of_thread = threading.local()  # a loss must not wait behind gigabytes of a snapshot

    def enter(self) -> None:
        """Set CUDA's device for this thread, else it makes a context on GPU 0."""
        torch.cuda.set_device(self.device)

    def name(self) -> str:
        """Return the UUID; of a MIG instance its own."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def facts(self) -> dict[str, Any]:
        """Return facts that choose kernels and the order of NCCL's sums."""
        properties = torch.cuda.get_device_properties(self.device)
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        own = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        return {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory >> 30,
            "driver": devices.driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "nccl": ".".join(map(str, nccl)),
            "tf32": tf32(),
            "ranks_per_node": os.environ.get("LOCAL_WORLD_SIZE", "1"),
            **{name: value for name, value in own.items() if not name.startswith(_NCCL_OTHER)},
        }

    def number(self, tensor: torch.Tensor) -> Number:
        """Return a copy on the device, without a wait."""
        if not tensor.is_cuda:
            return float(tensor)
        flat = tensor.detach().view(())
        return flat.to(self.device, torch.float64, non_blocking=True, copy=True)

    def numbers(self, values: Sequence[Number]) -> torch.Tensor:
        """Put numbers into a vector without a wait: host numbers come from page-locked memory."""
        known = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        host = torch.tensor(known, dtype=torch.float64, pin_memory=True)
        vector = host.to(self.device, non_blocking=True)
        measured = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        if measured:
            places = [vector[i] for i, _ in measured]
            torch._foreach_copy_(places, [v.detach().view(()) for _, v in measured])
        return vector

    def read(self, vector: torch.Tensor, work: Any = None) -> Reading:
        """Copy to the host beside work queued later."""
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            if work is not None:
                work.wait()  # NCCL makes this stream wait, not the host
            host.copy_(vector, non_blocking=True)
            vector.record_stream(self._out)
            event = self._out.record_event()
        return _Queued(host, event)

    def mark(self) -> Any:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Copy on a stream that never waits for the model's."""
        self._model = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._in):
            yield
        self._model.wait_stream(self._in)

    def loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; its memory is the copying stream's, used by the model's."""
        if tensor.layout is not torch.strided:  # torch cannot mark its memory so
            with torch.cuda.stream(self._model):
                return tensor.to(self.device)
        moved = tensor.to(self.device, non_blocking=True)
        moved.record_stream(self._model)
        return moved

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory, which torch caches."""
        return tensor if tensor.is_cuda else tensor.pin_memory()

    @contextlib.contextmanager
    def saving(self, ready: Any) -> Iterator[None]:
        """Copy on a stream of this thread."""
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._of_thread.stream
        if ready is not None:
            stream.wait_event(ready)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:  # also after an error: the memory is reused, or freed
            stream.synchronize()

    def pin(self, memory: torch.Tensor) -> bool:
        """Register memory that CUDA has not allocated."""
        cudart: Any = torch.cuda.cudart  # torch gives it no types
        found = int(cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if found:
            with contextlib.suppress(RuntimeError):
                # CUDA reports an error twice: else this thread's next kernel would get the blame.
                torch.ones(1, device=self.device)
        torch.cuda.check_error(found)
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        """Unregister memory; its errors do not matter any more."""
        cudart: Any = torch.cuda.cudart
        cudart().cudaHostUnregister(memory.data_ptr())

    def release(self) -> None:
        """Free cached memory; waits for the device, so not in every step."""
        torch.cuda.empty_cache()


class _Queued(Reading):
    def __init__(self, host: torch.Tensor, event: torch.Event) -> None:
        super().__init__(host)
        self._event = event

    def values(self) -> list[float]:
        # Not synchronize(), which blocks signal handlers and spins a core.
        pause = _FIRST_PAUSE_SECONDS
        while not self._event.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return super().values()


def tf32() -> list[str]:
    """Return how matrix products, convolutions and RNNs compute fp32.

    Not by cuDNN's own flag, which ignores `allow_tf32`.
    """
    backends = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)  # type: ignore[attr-defined]
    return [str(part.fp32_precision).replace("none", "ieee") for part in parts]


@functools.cache
def of(device: torch.device) -> Accelerator:
    """Return the accelerator of a device, one per process."""
    return Cuda(device) if device.type == "cuda" else Accelerator(device)


def choose(asked: str, local_rank: int, env: Mapping[str, str]) -> torch.device:
    """Return the device of this process, and make it CUDA's current one.

    ``asked``: auto, cuda or cpu; auto is a GPU where the container has one. Raises ConfigError or
    HardwareError rather than train on the CPU where a GPU was meant.
    """
    if not devices.any_here():
        # torch's optimizers ask in each step. CUDA answers once; NVML is looked for each time.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    if asked == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        has = devices.given(env)
        if asked == "auto" and not has:
            return torch.device("cpu")
        raise _unusable("start() asks for one" if asked == "cuda" else "there is one", env, has=has)
    count = torch.cuda.device_count()
    # One visible device per process, as with Slurm and some device plugins.
    index = local_rank if count > 1 else 0
    if index >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank}, but this machine shows {count} GPUs: lower nprocPerNode"
            " or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:  # NVML had counted it, see PYTORCH_NVML_BASED_CUDA_CHECK
        raise _unusable("there is one", env, has=True) from error
    return device


def _unusable(though: str, env: Mapping[str, str], *, has: bool) -> Exception:
    """Build the error, with torch's reason: a ConfigError if every node would have that fault."""
    words = "torch sees none"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    wrong = devices.misnamed(env)
    if wrong:
        last = devices.count() - 1
        cure = f"CUDA_VISIBLE_DEVICES begins with {wrong}, GPUs here are 0 to {last}: leave it out"
    elif has:
        cure = "Look at the node's driver, the pod's runtimeClassName and the image's torch"
    else:
        cure = "Ask for nvidia.com/gpu in the container's limits, and look at the image's torch"
    text = f"no GPU can be used, though {though}: {words}. {cure}; to train on the CPU:"
    text += " start(device='cpu')"
    known = wrong or not has or any(known in words for known in _SETUP)
    return ConfigError(text) if known else HardwareError(text)
