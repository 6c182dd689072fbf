"""State as tensors and JSON. No pickle is ever written or read.

``flatten`` splits any nesting of dicts, lists, tuples, numbers, strings, bytes and tensors into
named tensors and a JSON tree that refers to them; ``unflatten`` joins them.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

#: safetensors' names of element types.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

_MARK = "$"
#: Mappings besides dict that state_dict() of torch and of users may hold.
_MAPPINGS: dict[str, Callable[[], Any]] = {
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    "defaultdict int": lambda: defaultdict(int),
    "defaultdict float": lambda: defaultdict(float),
    "defaultdict list": lambda: defaultdict(list),
    "defaultdict dict": lambda: defaultdict(dict),
}


@dataclass(slots=True)
class Flat:
    """Named tensors, and the JSON tree that holds everything else.

    Tensors that share memory (tied weights) are stored once: ``aliases`` maps the others.
    """

    tree: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def flatten(state: Any) -> Flat:
    """Split a state. Raises TypeError that names the place of a value that cannot be stored."""
    flat = Flat()
    seen: dict[tuple[object, ...], str] = {}
    flat.tree = _encode(state, "", flat, seen)
    return flat


def _encode(value: Any, path: str, flat: Flat, seen: dict[tuple[object, ...], str]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, flat, seen)
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, flat, seen)
    if isinstance(value, list | tuple):
        parts = [_encode(v, f"{path}/{i}", flat, seen) for i, v in enumerate(value)]
        return {"$tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"cannot store {path}: an array of {value.dtype}")
        return {"$numpy": _encode_tensor(torch.from_numpy(value), path, flat, seen)["$tensor"]}
    if isinstance(value, np.generic):
        return _encode(value.item(), path, flat, seen)
    raise TypeError(
        f"cannot store {path}: a {type(value).__name__}; state must consist of tensors, numbers,"
        " strings, bytes, None, lists, tuples and dicts"
    )


def _encode_mapping(
    value: Mapping[Any, Any], path: str, flat: Flat, seen: dict[tuple[object, ...], str]
) -> Any:
    items = [
        (k, _encode(v, f"{path}/{k}" if path else str(k), flat, seen)) for k, v in value.items()
    ]
    node: Any = dict(items)
    if not all(isinstance(k, str) and not k.startswith(_MARK) for k, _ in items):
        node = {"$dict": [[_encode(k, f"{path} (a key)", flat, seen), v] for k, v in items]}
    if type(value) is dict:
        return node
    for name, make in _MAPPINGS.items():
        empty = make()
        if type(value) is type(empty) and getattr(value, "default_factory", None) == getattr(
            empty, "default_factory", None
        ):
            return {"$mapping": [name, node]}
    raise TypeError(
        f"cannot store {path}: a {type(value).__name__}; of mappings only dict, OrderedDict,"
        " Counter, and defaultdict of int, float, list or dict can be stored"
    )


def _encode_tensor(
    value: torch.Tensor, path: str, flat: Flat, seen: dict[tuple[object, ...], str]
) -> dict[str, str]:
    if value.is_complex() and value.layout == torch.strided:
        pairs = torch.view_as_real(value.detach().resolve_conj())
        return {"$complex": _encode_tensor(pairs, path, flat, seen)["$tensor"]}
    if value.dtype not in DTYPES or value.layout != torch.strided:
        raise TypeError(f"cannot store {path}: a tensor of {value.dtype}, {value.layout}")
    tensor = value.detach()
    while path in flat.tensors or path in flat.aliases:
        path += "'"  # {"a/b": x, "a": {"b": y}}, or the keys 1 and "1"
    if tensor.numel():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = seen.setdefault(key, path)
        if first != path:
            flat.aliases[path] = first
            return {"$tensor": path}
    flat.tensors[path] = tensor
    return {"$tensor": path}


def unflatten(flat: Flat) -> Any:
    """Join what flatten() split. Aliases share one tensor. Raises ValueError."""
    return _decode(flat.tree, flat)


def _decode(node: Any, flat: Flat) -> Any:
    if isinstance(node, list):
        return [_decode(part, flat) for part in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        mark, content = next(iter(node.items()))
        if mark.startswith(_MARK):
            return _decode_marked(mark, content, flat)
    return {key: _decode(value, flat) for key, value in node.items()}


def _decode_marked(mark: str, content: Any, flat: Flat) -> Any:
    if mark == "$tensor":
        return flat.tensors[flat.aliases.get(content, content)]
    if mark == "$complex":
        pairs = flat.tensors[flat.aliases.get(content, content)]
        # Real and imaginary part must lie at an even place, which not every buffer gives.
        return torch.view_as_complex(pairs.clone() if pairs.storage_offset() % 2 else pairs)
    if mark == "$mapping" and content[0] in _MAPPINGS:
        made = _MAPPINGS[content[0]]()
        made.update(_decode(content[1], flat))
        return made
    if mark == "$numpy":
        return flat.tensors[flat.aliases.get(content, content)].numpy()
    if mark == "$tuple":
        return tuple(_decode(part, flat) for part in content)
    if mark == "$dict":
        return {_decode(key, flat): _decode(value, flat) for key, value in content}
    if mark == "$float":
        return float(content)
    if mark == "$bytes":
        return base64.b64decode(content)
    raise ValueError(f"unknown mark {mark} in a snapshot's tree")


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in C order, without a copy where it is contiguous in memory already."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)
