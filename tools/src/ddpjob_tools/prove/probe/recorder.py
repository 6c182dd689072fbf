"""Write a line for each step of an optimizer, from torch's own global hooks; __main__.py starts it.

A line holds hashes: of the state before the step (weights, optimizer, hyperparameters, random
numbers, buffers), of inputs and outputs since the step before, of the gradients, of the weights
after it. Each is one write at the end of its step, so that SIGKILL loses no earlier one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddpjob_tools.prove.probe import fingerprint

#: Of more files than these at the start only those are looked at that come later.
_MANY: Final = 2000
#: A checkpoint under way at the kill is whole when its folder was still for so long.
_STILL_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 10.0
_Stat = tuple[int, int, int]


class Watched:
    """The files below a folder: which steps leave a checkpoint, whatever writes it.

    Links are not followed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[Path, int] = {}  # when something in it was made or removed last
        self._files: dict[Path, _Stat] = {}
        self._ignored: frozenset[Path] = frozenset()
        self._scan(root)
        if len(self._files) > _MANY:
            self._ignored, self._files = frozenset(self._files), {}

    def changed(self) -> dict[str, int]:
        """Return the sizes of files that were written since the last call, by path."""
        before = dict(self._files)
        for folder, seen in list(self._folders.items()):
            if (stat := _stat(folder)) is None:
                del self._folders[folder]
            elif stat[0] != seen:
                self._scan(folder)
        for path in before:
            self._note(path)
        return {
            str(path.relative_to(self._root)): stat[2]
            for path, stat in self._files.items()
            if before.get(path) != stat
        }

    def settle(self) -> dict[str, int]:
        """Return what is written until nothing more is: threads end a checkpoint under way."""
        found: dict[str, int] = {}
        since = began = time.monotonic()
        while (now := time.monotonic()) < min(since + _STILL_SECONDS, began + _MOST_SECONDS):
            if changed := self.changed():
                found, since = found | changed, now
            time.sleep(0.05)
        return found

    def _scan(self, folder: Path) -> None:
        if (stat := _stat(folder)) is None:
            return
        self._folders[folder] = stat[0]
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return  # it is gone already
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if path not in self._folders:
                    self._scan(path)
            elif path not in self._files and path not in self._ignored:
                self._note(path)

    def _note(self, path: Path) -> None:
        stat = _stat(path)
        if stat is None:
            self._files.pop(path, None)
        else:
            self._files[path] = stat


def _stat(path: Path) -> _Stat | None:
    try:
        it = path.lstat()
    except OSError:
        return None
    return it.st_mtime_ns, it.st_ino, it.st_size


#: Forwards of one step that are written one by one; the others are in one hash.
_CALLS: Final = 64
#: Tensors that get a hash each, to name those that were not loaded.
_PARTS: Final = 400
#: Packages with resume words of their own, as the user knows them: module that is in use -> name.
_FRAMEWORKS: Final = {
    "ddpjob_trainer.training": "ddpjob_trainer",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "pytorch_lightning",
    "transformers.trainer": "transformers",
    "accelerate": "accelerate",
}


@dataclass(slots=True)
class _Since:
    """What has happened in this process since the step before."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    rng: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    loss: float | None = None


class Recorder:
    """The hooks of one process, and of those that are forked from it."""

    def __init__(self, out: Path, watch: Path, first: bool, stop_at: int | None) -> None:
        """Write below ``out``; after step ``stop_at`` of this process stop, to be killed there.

        ``first``: this rank notes the files that are written below ``watch``.
        """
        self._out, self._watch = out, watch
        self._watched = Watched(watch) if first else None
        self._stop_at = stop_at
        self._since = _Since()
        self._depth = 0
        self._steps = 0
        self._stepping: torch.optim.Optimizer | None = None
        self._before: dict[str, Any] = {}
        self._optimizers: list[int] = []
        self._names: dict[int, str] = {}
        self._modules: dict[int, tuple[str, frozenset[str]]] = {}
        self._inner: set[int] = set()
        self._pid, self._fd = 0, -1

    def start(self) -> None:
        """Register the hooks."""
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._end)

    # --- Modules -------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if _traced():
            return
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and id(module) not in self._inner:
            self._note_random_state()
            self._note_buffers(module)

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """Take note of a call. ``rest``: kwargs and output; the output alone after an exception."""
        if _traced():
            return
        self._depth = max(0, self._depth - 1)
        # A part of a module that was called before: checkpointing computes it once more.
        if self._depth or not torch.is_grad_enabled() or id(module) in self._inner:
            return
        try:
            self._note_call(module, list(fingerprint.tensors((args, rest[:-1]))), rest[-1])
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return  # tensors without a content, as within torch.func.vmap()

    def _note_call(self, module: torch.nn.Module, given: list[torch.Tensor], output: Any) -> None:
        results = list(fingerprint.tensors(output))
        if not any(one.requires_grad for one in results):
            return  # nothing is learned from it: an evaluation, a frozen teacher
        since = self._since
        data = [one for one in given if one.grad_fn is None]
        inputs = fingerprint.digest(data, fingerprint.MOST)
        outputs = fingerprint.digest(results, fingerprint.MOST)
        if len(since.inputs) < _CALLS:
            since.inputs.append(inputs)
            since.outputs.append(outputs)
            if data and len(data) == len(given) and module.training:
                since.samples += fingerprint.samples(data)
        else:
            since.inputs[-1] = fingerprint.digest((since.inputs[-1], inputs))
            since.outputs[-1] = fingerprint.digest((since.outputs[-1], outputs))
        since.loss = _loss(output, results, since.loss)

    def _note_random_state(self) -> None:
        if not self._since.rng:
            self._since.rng = _random_state()

    def _note_buffers(self, module: torch.nn.Module) -> None:
        """Hash what the module keeps beside the weights that an optimizer has."""
        if id(module) not in self._modules:
            self._modules[id(module)] = self._known(module)
        key, names = self._modules[id(module)]
        if key in self._since.buffers:
            return
        kept = [one for name, one in module.named_buffers() if name in names]
        frozen = [one for one in module.parameters() if not one.requires_grad]
        if kept or frozen:
            self._since.buffers[key] = fingerprint.digest((*kept, *frozen), fingerprint.MOST)

    def _known(self, module: torch.nn.Module) -> tuple[str, frozenset[str]]:
        """Return a name that it has in another process, too, and those of its saved tensors."""
        weights = dict(module.named_parameters())
        self._names |= {id(one): name for name, one in weights.items()}
        self._inner |= {id(one) for one in module.modules() if one is not module}
        name = fingerprint.digest([type(module).__qualname__, *weights])
        alike = sum(key.startswith(name) for key, _ in self._modules.values())
        return f"{name}.{alike}", _kept(module)

    # --- Optimizers ----------------------------------------------------------------------

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stepping not in (None, optimizer):
            return  # one optimizer that works through another
        self._stepping = optimizer
        self._note_random_state()
        states = [optimizer.state.get(one) for one in _weights(optimizer)]
        self._before = {
            "weights": [fingerprint.digest([one]) for one in _weights(optimizer)],
            "state": fingerprint.digest(states),
            "empty": not any(states),
            "hyper": [_hyperparameters(group) for group in optimizer.param_groups],
        }
        if self._watched is not None:
            self._before["files"] = self._watched.changed()

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        weights = list(_weights(optimizer))
        # Known by its weights: some programs make a new optimizer for them every epoch.
        key = id(weights[0]) if weights else 0
        if key not in self._optimizers:
            self._optimizers.append(key)
        gradients = [one.grad for one in weights if one.grad is not None]
        since, self._since = self._since, _Since()
        before = self._before
        parts = before.pop("weights")
        line: dict[str, Any] = {
            "optimizer": self._optimizers.index(key),
            **before,
            "weights": fingerprint.digest(parts),
            "parts": parts if len(parts) <= _PARTS else [],
            "rng": since.rng,
            "buffers": since.buffers,
            "inputs": since.inputs,
            "samples": since.samples,
            "outputs": since.outputs,
            "loss": since.loss,
            "gradients": fingerprint.digest(gradients),
            "norm": fingerprint.norm(gradients),
            "after": fingerprint.digest([fingerprint.digest([one]) for one in weights]),
            "at": time.time(),
        }
        self._steps += 1
        if self._steps == self._stop_at:
            written = (self._watched or Watched(self._watch)).settle()
            if self._watched is not None:
                line["files"] |= written
        self._write(line, weights)
        if self._steps == self._stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _write(self, line: dict[str, Any], weights: list[torch.Tensor]) -> None:
        if self._pid != os.getpid():  # the first step here, or in a process that was forked
            self._pid = os.getpid()
            rank, world = _rank_and_world()
            path = self._out / f"rank-{rank}.{self._pid}.jsonl"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            names = [self._names.get(id(one), f"weight {i}") for i, one in enumerate(weights)]
            _put(self._fd, {
                "rank": rank, "world": world, "names": names[:_PARTS],
                "bytes": sum(one.numel() * one.element_size() for one in weights),
                "frameworks": dict(_frameworks()), "torch": torch.__version__,
            })  # fmt: skip
        _put(self._fd, line)


def _traced() -> bool:
    """Return whether torch records what runs, to run it later: our hooks are no part of that."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    cuda = torch.cuda
    return cuda.is_initialized() and cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _put(fd: int, line: dict[str, Any]) -> None:
    left = memoryview((json.dumps(line) + "\n").encode())
    while left:
        left = left[os.write(fd, left) :]


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's own settings, as lr, by name."""
    found: dict[str, Any] = {}
    for name, value in sorted(group.items()):
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
            found[name] = value.item()
        elif name != "params":
            plain = value is None or isinstance(value, bool | int | float | str)
            found[name] = value if plain else fingerprint.digest([value])
    return found


def _random_state() -> dict[str, str]:
    found = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (name, keys.tobytes().hex(), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return {name: fingerprint.digest([repr(state) if name == "python" else state])
            for name, state in found.items()}  # fmt: skip


def _kept(module: torch.nn.Module) -> frozenset[str]:
    """Name what its state_dict() has: other buffers are made again by the program."""
    if "FullyShardedDataParallel" in type(module).__name__:
        return frozenset()  # its state_dict() is a collective
    try:
        return frozenset(module.state_dict())
    except Exception:  # user's code: a module that cannot be saved is no reason to end it
        return frozenset()


def _loss(output: Any, results: list[torch.Tensor], before: float | None) -> float | None:
    """Read a loss: a scalar result, or one of that name."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    loss = named if isinstance(named, torch.Tensor) else results[0]
    return float(loss.detach().item()) if loss.numel() == 1 and not loss.is_meta else before


def _rank_and_world() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), 1


def _frameworks() -> Iterator[tuple[str, str]]:
    for module, name in _FRAMEWORKS.items():
        if module in sys.modules:
            yield name, str(getattr(sys.modules.get(name), "__version__", ""))
