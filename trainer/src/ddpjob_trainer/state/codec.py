"""Turn state into tensors and JSON. No pickle is ever written or read.

``flatten`` splits any nesting of dicts, lists, tuples, deques, numbers, strings, bytes and tensors
into named tensors and a JSON tree that refers to them; ``unflatten`` joins them. Subclasses of
these (a namedtuple, a str Enum) are stored as what they are of, or refused within Exact.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddpjob_trainer.gpu.accelerator import in_order

#: safetensors' names of element types.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

_MARK = "$"
_TENSORS = ("$tensor", "$complex", "$numpy")
_NUMBER_BYTES = 8  # of numpy's scalars: longer ones differ from machine to machine
#: Deep enough for any state, and far from where reading it would end in a RecursionError.
_MAX_DEPTH = 100
#: Mappings besides dict that state_dict() of torch and of users may hold.
_MAPPINGS: dict[str, Callable[[], Any]] = {
    "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict,
    "defaultdict int": lambda: defaultdict(int), "defaultdict float": lambda: defaultdict(float),
    "defaultdict list": lambda: defaultdict(list), "defaultdict dict": lambda: defaultdict(dict),
}  # fmt: skip


#: What subclasses are stored as, and how it is made of them.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int, float: float, str: str.__str__, list: list, tuple: tuple,
    bytes: lambda value: bytes(memoryview(value)),
}  # fmt: skip


_CURE = (
    "state must consist of tensors, numbers, strings, bytes, None, lists, tuples, deques and dicts;"
    " if it is a subclass of these, after a resume it would be of another type: keep what it is"
    " made of (.value, .detach(), tuple(...) or np.asarray(...) of it), and make it again of that."
    " Of a library's class derive one whose state_dict() and load_state_dict() do so, or take"
    " another, as torch's SequentialLR for a warm-up"
)


class UnstorableError(TypeError):
    """A value that no snapshot can hold. The message says where it is."""


@dataclass(frozen=True, slots=True)
class Exact:
    """A value that the script reads itself after a resume. One of another type then is refused.

    ``tensors_only``: its owner takes it back, and makes numbers of another type again itself.
    """

    value: Any
    tensors_only: bool = False


@dataclass(slots=True)
class Flat:
    """Named tensors, and the JSON tree that holds everything else.

    Tensors that share memory (tied weights) are stored once: ``aliases`` maps the others.
    """

    tree: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def flatten(state: Any) -> Flat:
    """Split a state. Raises UnstorableError, which names the value's place."""
    encoder = _Encoder()
    encoder.flat.tree = encoder.encode(state, "", 0)
    return encoder.flat


class _Encoder:
    """Goes through one state. ``path``: where a value is, as errors and tensors' names say it."""

    def __init__(self) -> None:
        self.flat = Flat()
        self._seen: dict[tuple[Any, ...], str] = {}  # by where they begin and their kind: names
        self._exact = self._exact_tensors = False

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._array(value, path)
        if value is None or type(value) in (bool, str, int):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.generic) and _is_plain(value.dtype):
            content = self.encode(value.item(), path, depth)
            return {"$generic": [value.dtype.str, content]}
        if isinstance(value, Exact):
            self._exact, self._exact_tensors = not value.tensors_only, True
            node = self.encode(value.value, path, depth)
            self._exact = self._exact_tensors = False
            return node
        return self._other(value, path, depth)

    def _array(self, value: torch.Tensor | np.ndarray[Any, Any], path: str) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise UnstorableError(f"cannot store {path}: an array of {value.dtype}")
        other = self._exact and type(value) not in (torch.Tensor, np.ndarray)
        if self._exact_tensors and isinstance(value, torch.Tensor):  # it may hold codes and a scale
            other = other or type(value) not in (torch.Tensor, torch.nn.Parameter)
        if other or isinstance(value, np.ma.MaskedArray):  # its mask would be lost
            raise UnstorableError(f"cannot store {path}: a {type(value).__name__}; {_CURE}")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        # Tensors know no other byte order, and no strides below 0.
        native = np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")
        return {"$numpy": self._tensor(torch.from_numpy(native), path)["$tensor"]}

    def _other(self, value: Any, path: str, depth: int) -> Any:
        if not self._exact and (make := _base(value)):
            return self.encode(make(value), path, depth)
        if depth == _MAX_DEPTH:
            raise UnstorableError(f"cannot store {path[:99]}...: nested deeper than {depth} times")
        depth += 1
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if type(value) in (list, tuple, deque, torch.Size):
            return self._sequence(value, path, depth)
        raise UnstorableError(f"cannot store {path}: a {type(value).__name__}; {_CURE}")

    def _sequence(self, value: Sequence[Any], path: str, depth: int) -> Any:
        parts = [self.encode(v, f"{path}/{i}", depth) for i, v in enumerate(value)]
        if isinstance(value, deque):
            return {"$deque": [value.maxlen, parts]}
        if isinstance(value, torch.Size):
            return {"$size": parts}
        return {"$tuple": parts} if isinstance(value, tuple) else parts

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        items = [
            (self._key(k), self.encode(v, f"{path}/{k}" if path else str(k), depth))
            for k, v in value.items()
        ]
        node: Any = dict(items)
        if not all(type(k) is str and not k.startswith(_MARK) for k, _ in items):
            node = {"$dict": [[self.encode(k, f"{path} (a key)", depth), v] for k, v in items]}
        if type(value) is dict:
            return node
        for name, make in _MAPPINGS.items():
            if _makes(value) == _makes(make()):
                return {"$mapping": [name, node]}
        raise UnstorableError(
            f"cannot store {path}: a {type(value).__name__}; of mappings only dict, OrderedDict,"
            " Counter, and defaultdict of int, float, list or dict can be stored"
        )

    def _key(self, key: Any) -> Any:
        make = None if self._exact or type(key) is str else _base(key)
        return make(key) if make else key

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, str]:
        flat = self.flat
        if value.dtype not in DTYPES or value.layout is not torch.strided:
            if value.is_complex() and value.layout == torch.strided:
                pairs = torch.view_as_real(value.detach().resolve_conj())
                return {"$complex": self._tensor(pairs, path)["$tensor"]}
            raise UnstorableError(f"cannot store {path}: a tensor of {value.dtype}, {value.layout}")
        tensor = value.detach() if value.requires_grad else value
        while path in flat.tensors or path in flat.aliases:
            path += "'"  # {"a/b": x, "a": {"b": y}}, or the keys 1 and "1"
        first = path
        if tensor.numel() and has_memory(tensor):
            elements = (
                tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(),
                tensor.is_neg(),
            )  # fmt: skip
            first = self._seen.setdefault(elements, path)
        if first == path:
            flat.tensors[path] = tensor
        else:
            flat.aliases[path] = first
        return {"$tensor": path}


def _makes(value: Mapping[Any, Any]) -> tuple[Any, Any]:
    return type(value), getattr(value, "default_factory", None)


def _base(value: Any) -> Callable[[Any], Any] | None:
    """Return how to make a subclass's plain type of a value; None for others."""
    if type(value) in _BASES or isinstance(value, np.generic | bool):
        return None
    return next((make for kind, make in _BASES.items() if isinstance(value, kind)), None)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "US" or (dtype.kind in "biuf" and dtype.itemsize <= _NUMBER_BYTES)


def without_numpys(node: Any) -> Any:
    """Replace numpy's numbers and strings in a tree by Python's, which all readers know."""
    if isinstance(node, list):
        return [without_numpys(part) for part in node]
    if not isinstance(node, dict):
        return node
    if "$generic" in node:
        return node["$generic"][1]
    return {key: without_numpys(part) for key, part in node.items()}


def unflatten(flat: Flat) -> Any:
    """Join what flatten() split. Aliases share one tensor. Raises ValueError, LookupError."""
    return _decode(flat.tree, flat)


def member(node: Any, name: str) -> Any:
    """Return one value of an encoded mapping, still encoded. Raises KeyError."""
    if "$mapping" in node:
        node = node["$mapping"][1]
    if "$dict" in node:
        return dict(map(tuple, node["$dict"]))[name]
    return node[name]


def tensor_names(node: Any) -> Iterator[str]:
    """Yield the names of all tensors below a node, aliases as they are."""
    if isinstance(node, list):
        for part in node:
            yield from tensor_names(part)
    elif isinstance(node, dict):
        for key, part in node.items():
            if key in _TENSORS and isinstance(part, str):
                yield part
            else:
                yield from tensor_names(part)


def _decode(node: Any, flat: Flat) -> Any:
    if isinstance(node, list):
        return [_decode(part, flat) for part in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        mark, content = next(iter(node.items()))
        if mark.startswith(_MARK):
            return _READERS[mark](content, flat)
    return {key: _decode(value, flat) for key, value in node.items()}


def _tensor_named(name: Any, flat: Flat) -> torch.Tensor:
    return flat.tensors[flat.aliases.get(name, name)]


def _complex(name: Any, flat: Flat) -> torch.Tensor:
    pairs = _tensor_named(name, flat)
    # Real and imaginary part must lie at an even place, which not every buffer gives.
    return torch.view_as_complex(pairs.clone() if pairs.storage_offset() % 2 else pairs)


def _generic(pair: Any, flat: Flat) -> Any:
    dtype = np.dtype(pair[0])
    if not _is_plain(dtype):
        raise ValueError(f"no number is of type {dtype}")
    return dtype.type(_decode(pair[1], flat))


def _made(content: Any, flat: Flat) -> Any:
    made = _MAPPINGS[content[0]]()
    made.update(_decode(content[1], flat))
    return made


#: How to make a value of the data beside its mark.
_READERS: dict[str, Callable[[Any, Flat], Any]] = {
    "$tensor": _tensor_named,
    "$complex": _complex,
    "$numpy": lambda name, flat: _tensor_named(name, flat).numpy(),
    "$generic": _generic,
    "$mapping": _made,
    "$dict": lambda pairs, flat: dict(_decode(pairs, flat)),
    "$size": lambda sizes, flat: torch.Size(sizes),
    "$tuple": lambda parts, flat: tuple(_decode(parts, flat)),
    "$deque": lambda pair, flat: deque(_decode(pair[1], flat), pair[0]),
    "$float": lambda text, flat: float(text),
    "$bytes": lambda text, flat: base64.b64decode(text),
}


def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether its elements lie there, and not in codes that its class reads."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def raw(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes in C order, without a copy where memory has that order."""
    return memoryview(in_order(tensor).cpu().view(torch.uint8).numpy().data)
