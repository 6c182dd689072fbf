"""The version before this one, as its users have it: the wheels of tests/frozen.

Launchers and operators of it run beside those of this checkout, in processes of their own.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

WHEELS = Path(__file__).resolve().parents[1] / "frozen"


def unpacked(distribution: str, folder: Path) -> str:
    """Unpack `ddpjob_trainer` or `ddpjob_operator`, as pip does; return it as a PYTHONPATH.

    Python runs a wheel as it is, too, but would compile it anew in each of the many processes.
    """
    [wheel] = WHEELS.glob(f"{distribution}-*.whl")
    for each in (wheel, *WHEELS.glob("ddpjob_contract-*.whl")):  # which older ones hold
        with zipfile.ZipFile(each) as packed:
            packed.extractall(folder)
    return str(folder)
