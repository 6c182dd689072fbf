"""Pack the parts of a spec that only render.py reads, as bounded, compressed JSON.

observe.py packs each DDPJob as it arrives: as dicts a template takes up to 30 times its JSON, a
user may write a megabyte of it, and each of the gang's pods repeats it. The few facts that
decisions need are worked out once, into Template.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from ddpjob_contract import crd
from ddpjob_operator.core.objects.json_read import mapping, sequence, text

_QUANTITY: Final = re.compile(
    r"\+?(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE]))?"
)
_DECIMAL: Final = dict(zip("num kMGTPE", range(-9, 19, 3), strict=True))
_BINARY: Final = {f"{letter}i": 1 << 10 * n for n, letter in enumerate(" KMGTPE") if n}
#: Kubernetes takes 8.0, 8e0, +8, 8000m and 0.008k for 8, too.
_PLAIN: Final = re.compile("[0-9]{1,9}")
#: A quantity that is not zero, as 0, 0.0 and 0k are.
_SOME: Final = re.compile("[^a-zA-Z]*[1-9]")
#: With less of either, importing torch takes minutes, or is killed.
_LEAST: Final = {"cpu": ("100m", 0.0999), "memory": ("400Mi", 399.9 * 2**20)}
#: With either no scheduler is free to place the pods as one group of ours.
_PLACED: Final = ("nodeName", "schedulingGroup")
TEMPLATE_BYTES: Final = 128 * 1024
VOLUME_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """An object of a spec. ``digest``: 64 bits over its canonical JSON, as 16 hex digits."""

    data: bytes
    digest: str
    flaw: str = ""  # why it was not kept
    size: int = 0  # of that JSON, in bytes

    def unpack(self) -> dict[str, Any]:
        """Return the object as it was written, a new one each time."""
        found: dict[str, Any] = json.loads(zlib.decompress(self.data))
        return found


@dataclass(frozen=True, slots=True)
class Template:
    """spec.template. ``gpus``: the trainer's limit of ``gpu`` as written, empty without one.

    ``ports``: all declared. ``mounts``: paths of the trainer's volumes. ``host_network``: its pods
    are on their node's network. ``scarce``: in words, resources that the trainer has too little of.
    ``priority``: its class. ``scheduler``: the one that it names. ``placed``: the field by which no
    group can be placed.
    """

    packed: Packed
    has_trainer: bool
    gpu: str
    gpus: str
    ports: frozenset[int]
    mounts: frozenset[str]
    host_network: bool
    scarce: str
    priority: str
    scheduler: str
    placed: str

    @property
    def gpu_count(self) -> int:
        """Return how many GPUs a pod asks for, 0 where that is no plain number."""
        return int(self.gpus) if _PLAIN.fullmatch(self.gpus) else 0


def pack(raw: Mapping[str, Any], field: str, limit: int) -> Packed:
    """Pack an object of at most ``limit`` bytes of JSON; longer is a flaw."""
    try:
        # shell/api.py puts NaN for what is nested too deep to read.
        text = json.dumps(
            raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (ValueError, RecursionError):
        return Packed(b"", "", f"{field} is nested too deep: no pod needs more than 50 levels")
    if len(text) > limit:
        flaw = (
            f"{field} is {len(text)} bytes long as JSON, more than {limit}: "
            "put what is large into a ConfigMap and mount it"
        )
        return Packed(b"", "", flaw)
    digest = hashlib.sha256(text).hexdigest()[:16]
    return Packed(zlib.compress(text, 6), digest, size=len(text))


def template(raw: object) -> Template:
    """Pack spec.template, unless it is packed; without containers if it is malformed."""
    if isinstance(raw, Template):
        return raw
    whole = mapping(raw)
    body = mapping(whole.get("spec"))
    trainer = trainer_container(body)
    containers = [*sequence(body.get("containers")), *sequence(body.get("initContainers"))]
    declared = [port for c in containers for port in sequence(mapping(c).get("ports"))]
    limits = mapping(mapping(trainer.get("resources")).get("limits"))
    given = ((name, str(limits.get(name))) for name in crd.GPUS)
    gpu, gpus = next((one for one in given if _SOME.match(one[1])), (crd.GPUS[0], ""))
    numbers = (mapping(port).get("containerPort") for port in declared)
    mounts = (mapping(mount).get("mountPath") for mount in sequence(trainer.get("volumeMounts")))
    return Template(
        packed=pack(whole, "spec.template", TEMPLATE_BYTES),
        has_trainer=bool(trainer),
        gpu=gpu,
        gpus=gpus,
        ports=frozenset(number for number in numbers if isinstance(number, int)),
        mounts=frozenset(normal_path(path) for path in mounts if isinstance(path, str)),
        host_network=body.get("hostNetwork") is True,
        scarce=_scarce(mapping(trainer.get("resources"))),
        priority=text(body.get("priorityClassName")),
        scheduler=text(body.get("schedulerName")) or crd.SCHEDULER,
        placed=next((field for field in _PLACED if body.get(field)), ""),
    )


def _scarce(resources: Mapping[str, Any]) -> str:
    """Name limits, or else requests, too small for any program that imports torch."""
    found = []
    for name, (least, few) in _LEAST.items():
        for kind in ("limits", "requests"):
            given = mapping(resources.get(kind)).get(name)
            size = _number(given)
            if size is not None and size < few:
                found.append(f"{kind}.{name} {given} (at least {least})")
            if size is not None:
                break
    return ", ".join(found)


def _number(quantity: object) -> Decimal | None:
    """Read a quantity, such as 100m, 1.5Gi or 2e3; None if it is none."""
    found = _QUANTITY.fullmatch(str(quantity)[:32])
    if found is None:
        return None
    value, exponent, unit = Decimal(found[1]), found[2], found[3] or " "
    if exponent:
        return value.scaleb(int(exponent))
    return value * _BINARY[unit] if unit in _BINARY else value.scaleb(_DECIMAL[unit])


def volume(raw: object) -> Packed:
    """Pack spec.snapshot.volume, unless it is packed."""
    if isinstance(raw, Packed):
        return raw
    written = mapping(raw)
    if not any(isinstance(source, Mapping) for source in written.values()):
        # Kubernetes takes it for an emptyDir, which ends with its pod.
        what = "write one, for example persistentVolumeClaim: {claimName: NAME}"
        return Packed(b"", "", f"spec.snapshot.volume has no source: {what}")
    return pack(written, "spec.snapshot.volume", VOLUME_BYTES)


def spec(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Pack the parts of a raw .spec that only rendering reads."""
    slim = {**raw, "template": template(raw.get("template"))}
    snapshot = raw.get("snapshot")
    if isinstance(snapshot, Mapping):
        slim["snapshot"] = {**snapshot, "volume": volume(snapshot.get("volume"))}
    return slim


def normal_path(path: str) -> str:
    """Normalize a path in a container: /a is also at a, //a and /b/../a."""
    return "/" + posixpath.normpath(f"/{path}").lstrip("/")


def trainer_container(pod_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the container that trains: the one named "trainer", or else the first."""
    containers = [c for c in pod_spec.get("containers") or () if isinstance(c, Mapping)]
    named = (c for c in containers if c.get("name") == crd.TRAINER_CONTAINER)
    return next(named, containers[0] if containers else {})


def sidecars(pod_spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of native sidecars, which run beside the trainer and end with the pod."""
    inits = map(mapping, sequence(pod_spec.get("initContainers")))
    return frozenset(text(one.get("name")) for one in inits if one.get("restartPolicy") == "Always")


def container(pod_spec: Mapping[str, Any], name: object) -> Mapping[str, Any]:
    """Find a container by its name; empty if there is none."""
    found = (c for c in map(mapping, sequence(pod_spec.get("containers"))) if c.get("name") == name)
    return next(found, {})
