"""A cluster under random faults for half an hour and more: see run.py."""

from pathlib import Path


def paced_text() -> str:
    """What goes into the ConfigMap."""
    return (Path(__file__).parent / "paced.py").read_text()
