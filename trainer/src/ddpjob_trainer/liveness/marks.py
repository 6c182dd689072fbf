"""Show a launcher what its workers could save of a failure, in a small file that each maps.

A worker overwrites its marks at each step boundary. The launcher reads them once a peer has died,
to choose who saves, and whether that pays (launcher/rescue.py). Never imports torch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from struct import Struct, error

from ddpjob_trainer.liveness.heartbeat import mapped, path_of

#: Who has lost a peer stays so long for its launcher's order, which follows on the failure's report
#: within milliseconds, and within 2 s where the hub waits for the cause (root_cause.py).
HOLD_SECONDS = 5.0
_FORM = Struct("<qq??dd?")
_INTACT_AT = 16


@dataclass(frozen=True, slots=True)
class Marks:
    """``step``: the newest boundary; ``newest``: of the snapshot that a restart would go on from.

    ``intact``: no update has begun since the boundary. ``whole``: all of the state could be saved.
    ``step_seconds``, ``write_seconds``: how long a step and a write of the whole state take.
    ``vouched``: all ranks held the same bits one step before.
    """

    step: int = -1
    newest: int = -1
    intact: bool = False
    whole: bool = False
    step_seconds: float = 0.0
    write_seconds: float = 0.0
    vouched: bool = False

    @property
    def saved(self) -> float:
        """Return the seconds of training that a rescue would save."""
        return max(0, self.step - max(self.newest, 0)) * self.step_seconds


def socket_path(directory: Path, rank: int) -> Path:
    """Return where a worker listens for its launcher."""
    return directory / f"rank-{rank}.rescue"


class MarksWriter:
    """A worker's marks. Raises OSError where the file cannot be made."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._block = mapped(path_of(directory, rank, "marks"), _FORM.size)
        self.write(Marks())

    def in_flux(self) -> None:
        """Say that an update has begun: the boundary is over until the next write()."""
        self._block[_INTACT_AT] = 0

    def write(self, marks: Marks) -> None:
        """Publish them; a reader may see some of them a moment before the others."""
        self._block[:] = _FORM.pack(*astuple(marks))


def read_marks(directory: Path, rank: int) -> Marks:
    """Return a worker's marks; those of one that can save nothing where there are none."""
    try:
        return Marks(*_FORM.unpack(path_of(directory, rank, "marks").read_bytes()))
    except (OSError, error):
        return Marks()
