"""Define the messages between launchers and the hub, and carry them: one JSON object per line.

Launchers of two neighbouring versions are in one gang while a tag moves: a reader leaves out fields
that it does not know, and takes the default for those that are absent. So a new field needs a
default, and a new message must do no harm where it is passed over.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import re
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from ddpjob_contract import Round
from ddpjob_trainer.environment import Key
from ddpjob_trainer.launcher.hub.root_cause import Exit

MAX_LINE = 64 * 1024
_KIND = re.compile("[A-Za-z]{1,40}")
#: Fields that the version before closes a link for: sent only where they say something.
_LATER = (
    "foreign", "in_script", "code", "newest", "rescues", "rescue", "word", "hears", "quiet",
    "sizes", "size",
)  # fmt: skip
#: In an exit's exception, all that the version before knows of a drill.
_DRILL = "drill"


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a launcher. uid, replicas, nproc and standby must equal the hub's own.

    ``pod``: its uid. ``seat``: its number in the job, the hub's is 0. ``birth``: the attempt in
    which it was made. ``holds``: it waits while a lost launcher is replaced. ``running``: round 0
    of hub ``birth`` runs here; else nothing does. ``standby``: so many stand by in the job.
    ``held``: the replica that it served last, -1: none. ``token``: the job's secret. ``rescues``:
    a worker here may save the newest step before it is stopped. ``hears``: it reads Beat.quiet.
    ``sizes``: the job is elastic, and it reads Go.size.
    """

    uid: str
    pod: str
    seat: int
    birth: int
    replicas: int
    nproc: int
    holds: bool
    running: bool
    standby: int = 0
    held: int = -1
    rescues: bool = False
    hears: bool = False
    sizes: bool = False
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """Workers failed; ``running`` of the others still run. Sent again when more fail."""

    round: int
    exits: tuple[Exit, ...]
    running: int


@dataclass(frozen=True, slots=True)
class Exiting:
    """Killed workers are still exiting (GPU drivers can delay this)."""

    round: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """All processes of this round have ended here. ``exits``: of all workers."""

    round: int
    exits: tuple[Exit, ...]
    snapshot_step: int


@dataclass(frozen=True, slots=True)
class Done:
    """All workers here ended with 0, as in ``exits``."""

    round: int
    exits: tuple[Exit, ...] = ()


@dataclass(frozen=True, slots=True)
class Rescuing:
    """Answer a Stop with ``rescue``: yes; no: it does not pay; next: nobody can here; word; done.

    ``word``: of a worker that vouches; to a yes: "own", where two of this launcher do it alone;
    to done: which rank has saved which step.
    """

    round: int
    answer: str
    word: str = ""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The launcher got a signal to end; its workers may still save."""

    signal: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hub of this number, in this pod, has admitted the launcher to the gang."""

    number: int
    pod: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The hub refuses this launcher. ``final``: trying again cannot help."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Call:
    """First message of a new hub, to a launcher that is to leave its old one and say Hello.

    ``token``: the job's secret.
    """

    uid: str
    number: int
    pod: str
    token: str = field(default="", repr=False)


def is_of_the_job(said: Hello | Call, token: str) -> bool:
    """Tell whether a stranger knows the job's secret, if the pod here was made with one."""
    return not token or hmac.compare_digest(said.token.encode(), token.encode())


@dataclass(frozen=True, slots=True)
class Stop:
    """End the workers of this round and say Stopped.

    ``graceful``: a launcher leaves, so workers may still save together; else they are killed.
    ``rescue``: one saves the newest step before: "write", "alone" where no other launcher could
    vouch; "vouch": hash it; "word": to who writes, that of who vouches.
    """

    round: int
    graceful: bool = False
    rescue: str = ""
    word: str = ""


@dataclass(frozen=True, slots=True)
class Go:
    """Start this round of the hub of this number, as this replica.

    ``records``: of the rounds before. ``newest``: the checkpoint to go on from, "" for none.
    ``size``: so many launchers serve; 0: all of the job.
    """

    number: int
    round: int
    replica: int
    records: tuple[Round, ...]
    newest: str = ""
    size: int = 0

    @property
    def key(self) -> Key:
        """Return the incarnation that begins."""
        return Key(self.number, self.round)


@dataclass(frozen=True, slots=True)
class Ask:
    """From the hub to its own launcher: have the workers of all stop together, after a snapshot.

    The next round is to have more (E5).
    """

    round: int


@dataclass(frozen=True, slots=True)
class End:
    """No round follows. ``rank`` -1: no process is the cause.

    ``graceful``: a launcher got a signal to end, so workers may still save together. ``early``:
    names ranks, of any launcher, that ended with 0 before, so that this one lost its peers.
    ``code``: the exit code of that process's launcher, 0: the process's own.
    """

    rank: int
    why: str
    graceful: bool
    early: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """The hub says it each second and a launcher answers: the loops at both ends run.

    ``quiet``: ms since a rank of the gang, in the answer of this launcher, last printed a line; 0:
    nothing is said, as to a hub or a launcher that does not know it.
    """

    quiet: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers everywhere ended with 0."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message of another version: passed over on a link; a stranger's is no first message."""

    kind: str

    def __str__(self) -> str:
        return (
            f"passing over {self.kind}, a message that this version does not know: the launchers"
            " of this job are of two versions (do all pods have the same image?)"
        )


Message = (
    Hello | Failed | Exiting | Stopped | Done | Rescuing | Leaving
    | Call | Welcome | Refused | Stop | Go | Ask | End | Beat | Finished | Unknown
)  # fmt: skip
OfRound = Failed | Exiting | Stopped | Done | Rescuing  # what a launcher says of its round
_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in Message.__args__ if kind is not Unknown
}


def encode(message: Message) -> bytes:
    """Encode a message as one line."""
    body: dict[str, Any] = {"type": type(message).__name__, **asdict(message)}
    for part in (body, *body.get("exits", ())):
        if part.pop("drill", False):
            part["exception"] = _DRILL
        for name in _LATER:
            if not part.get(name):
                part.pop(name, None)
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a line. Raises ValueError or TypeError for anything but a message.

    A stranger may say Hello or Call only; launchers of this job say what is in the others.
    """
    body = json.loads(line)
    if not isinstance(body, dict):
        raise ValueError("not an object")
    name = body.get("type")
    if not isinstance(name, str) or not _KIND.fullmatch(name):
        raise ValueError("not a message")
    message: Message = _read(_TYPES[name], body) if name in _TYPES else Unknown(name)
    return message


def _read(kind: type[Any], body: dict[str, Any]) -> Any:
    """Make a message, or a part of one, of the fields that this version knows."""
    known = get_type_hints(kind)
    found = {name: body[name] for name in known.keys() & body.keys()}
    for name, value in found.items():
        if known[name] in (int, str, bool) and type(value) is not known[name]:
            raise ValueError(f"{name} of {kind.__name__} is no {known[name].__name__}")
    if "exits" in found:
        found["exits"] = tuple(_read(Exit, one) for one in _objects(found["exits"]))
    if "records" in found:
        found["records"] = _objects(found["records"])
    if kind is Exit and found.get("exception") == _DRILL:
        found |= {"exception": "", "drill": True}
    return kind(**found)


def _objects(found: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("not a list of objects")
    return tuple(found)


# --- The gang's last line -------------------------------------------------------------------------


class LastLine:
    """When a rank last printed, or gave another sign of life: ``here``, and in the whole ``gang``.

    By the monotonic clock of this machine: launchers exchange ages. The gang's is not known, inf,
    before a hub says it.
    """

    def __init__(self, *, leads: bool) -> None:
        self.here = 0.0
        self.gang = time.monotonic() if leads else math.inf
        self._looked = math.inf

    def look(self, now: float, here: float) -> None:
        """Take in when a rank here last did; each second: a longer pause is nobody's silence."""
        pause = max(0.0, now - self._looked - 2 * BEAT_SECONDS)
        self._looked = now
        self.here = max(self.here + pause, here)
        self.gang = max(self.gang + pause, here)

    def hear(self, quiet: int, now: float) -> None:
        """Take in an age that another launcher says; 0: a hub that does not know it."""
        known = self.gang if self.gang < math.inf else 0.0
        self.gang = max(known, now - quiet / 1000) if quiet else math.inf


def age(at: float, now: float) -> int:
    """Return Beat.quiet for that time."""
    return max(1, int((now - at) * 1000))


# --- The wire -------------------------------------------------------------------------------------

_MAX_PENDING = 1024 * 1024
_READ = 64 * 1024
#: Bytes of a stranger's line; a Hello has a few hundred.
FIRST_LINE = 4 * 1024
#: A hub speaks to each launcher so often, and looks whether it has answered.
BEAT_SECONDS = 1.0
#: Seconds of silence after which a link between launcher and hub is lost (L3).
_SILENT_SECONDS = 5
#: Before there is a link, a peer whose machine is gone is lost after half a minute.
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # ms; it also ends keepalive's probes
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Wire:
    """One connection, registered with the supervisor's selector.

    ``received`` gets each message, ``closed`` the reason, once, when the connection ends. The
    wire's owner sets them.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.received: Callable[[Message, float], None] = lambda message, now: None
        self.closed: Callable[[str, float], None] = lambda reason, now: None
        self._socket, self._selector = connection, selector
        self._in = self._out = b""
        self._open = True
        self.longest = MAX_LINE  # what a line may have
        self._silent = 0  # calls of count_silence since the last input
        connection.setblocking(False)
        for option in _OPTIONS:
            connection.setsockopt(*option)
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, message: Message) -> None:
        """Send, or keep it until the connection takes it."""
        if self._open:
            self._out += encode(message)
            self._flush()

    def count_silence(self, now: float) -> None:
        """Count a second; fail when too many have passed without input.

        The owner's loop calls it once a second while it runs, after reading: its own pauses, in
        which nobody could hear the peer, do not count.
        """
        self._silent += 1
        if self._silent > _SILENT_SECONDS:
            self._fail(f"it was silent for {_SILENT_SECONDS} s", now)

    def close(self) -> None:
        """Close without a call of ``closed``; drop unsent messages."""
        if self._open:
            self._open = False
            self._selector.unregister(self._socket)
            self._socket.close()

    def _ready(self, now: float) -> None:
        if not self._open:
            return
        self._flush()
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.strerror or str(error), now)
            return
        if not data:
            self._fail("it closed the connection", now)
            return
        self._silent = 0
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            try:
                if len(line) > self.longest:
                    raise ValueError(f"a line of {len(line)} bytes")
                self.received(decode(line), now)
            except (ValueError, TypeError, RecursionError) as error:
                self._fail(f"it sent what is no message: {error}", now)
            if self._socket.fileno() < 0:  # closed while handling the message
                return
        if len(self._in) > self.longest:
            self._fail("it sent an endless line", now)

    def _flush(self) -> None:
        if self._open and self._out:
            # A broken connection is noticed when reading.
            with contextlib.suppress(OSError):
                self._out = self._out[self._socket.send(self._out) :]
            if len(self._out) > _MAX_PENDING:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            self._selector.modify(self._socket, events, self._ready)

    def _fail(self, reason: str, now: float) -> None:
        if self._open:
            self.close()
            self.closed(reason, now)
