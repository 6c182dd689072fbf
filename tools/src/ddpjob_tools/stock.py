"""The stock image: its name, and its torch."""

from __future__ import annotations

from typing import Final

IMAGE: Final = "ddpjob/trainer:0.1.0"
#: As in requirements/torch.in; tests/unit/trainer/test_init.py holds them equal.
TORCH: Final = "2.13.0"
