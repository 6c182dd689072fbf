"""Operator and trainer carry one contract, byte for byte."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator/src/ddpjob_operator/core/contract.py"
TRAINER = ROOT / "trainer/src/ddpjob_trainer/contract.py"


def test_the_two_copies_are_one_file() -> None:
    assert OPERATOR.read_bytes() == TRAINER.read_bytes(), (
        f"{OPERATOR} and {TRAINER} must be identical: copy the one you meant over the other"
    )
