"""Name the stock image and its torch; check names that a DDPJob may have."""

from __future__ import annotations

import re
from typing import Final

IMAGE: Final = "ddpjob/trainer:0.2.0"
#: As in dev/requirements/torch.in; tests/unit/test_plugin_init.py holds them equal.
TORCH: Final = "2.13.0"
#: What Python can import there beside its own library; held to the pins by the same file.
MODULES: Final = frozenset({
    "cloudpickle", "cuda", "ddpjob_contract", "ddpjob_tools", "ddpjob_trainer", "filelock",
    "fsspec", "functorch", "jinja2", "joblib", "markupsafe", "mpmath", "narwhals", "networkx",
    "numpy", "prometheus_client", "safetensors", "scipy", "setuptools", "sklearn", "sympy",
    "threadpoolctl", "torch", "torchgen", "triton", "typing_extensions", "yaml",
})  # fmt: skip
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def name_flaw(given: object, *, most: int) -> str:
    """Say what is wrong with a name of a DDPJob; "" if nothing is."""
    if isinstance(given, str) and len(given) <= most and _JOB_NAME.fullmatch(given):
        return ""
    return f"{given!r} must be lower-case letters, digits and '-', a letter first, {most} at most"
