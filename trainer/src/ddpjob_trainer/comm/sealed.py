"""Authenticate what the ranks of one incarnation tell one another over torch's store.

rendezvous.py makes the Board; parts.py and shutdown.py post on it and poll it. All who
reach the store's port may set, read and remove any key. So what decides carries a MAC over the
key's name, the sender's rank and the bytes, under the key of this incarnation (environment.py),
and what does not is ignored. A stranger may still remove a note: then its reader waits.
"""

from __future__ import annotations

import hmac
from typing import Any

from torch._C._distributed_c10d import Store

from ddpjob_trainer.environment import Identity, StoreKey
from ddpjob_trainer.errors import ConfigError, PeerLostError
from ddpjob_trainer.printing import say

_MAC_BYTES = 32
_HEAD_BYTES = _MAC_BYTES + 4  # the sender's rank
#: Of a note. torch's store closes the connection of who sends it more than 8 MiB at once.
MOST_BYTES = 7 << 20
#: No note is so short.
_ABSENT = b"-"


class Seal:
    """Closes and opens notes of one incarnation's ``run``, counted in each process from 0."""

    def __init__(self, key: StoreKey, own: Identity, run: int = 0) -> None:
        self._key = hmac.digest(key.secret, f"{own.key} {run}".encode(), "sha256")
        self._final = key.final
        self.prefix = hmac.digest(self._key, b"prefix", "sha256")[:16].hex()  # of all its keys

    def close(self, name: str, rank: int, data: bytes) -> bytes:
        """Return a note of ``rank`` for the store's key ``name``."""
        head = rank.to_bytes(4)
        return self._mac(name, head + data) + head + data

    def open(self, name: str, note: bytes) -> tuple[int, bytes] | None:
        """Return a note's rank and data, None unless a rank of this incarnation closed it so."""
        mac, content = note[:_MAC_BYTES], note[_MAC_BYTES:]
        if len(content) < 4 or not hmac.compare_digest(mac, self._mac(name, content)):
            return None
        return int.from_bytes(content[:4]), content[4:]

    def _mac(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + content, "sha256")

    def refusal(self, text: str) -> ConfigError | PeerLostError:
        """Return the error for what an opened note says is wrong with the configuration.

        In a job without a token a stranger may have written it, and must not end it for good.
        """
        return ConfigError(text) if self._final else PeerLostError(text)


def data_of(note: bytes) -> bytes:
    """Return what a note says, whichever its origin."""
    return note[_HEAD_BYTES:]


def read(store: Store, key: str) -> bytes | None:
    """Read a key, None without it; get() would wait for one that a stranger has removed."""
    anyhow: Any = store  # its stub has no bytes
    value: bytes = anyhow.compare_set(key, _ABSENT, _ABSENT)
    return None if value in (_ABSENT, b"") else value


class Board:
    """Notes in the store. ``rank``: the reader's. Raises RuntimeError when the store is gone."""

    def __init__(self, store: Store, seal: Seal, rank: int) -> None:
        self._store: Any = store
        self._seal = seal
        self._rank = rank
        self._said: set[str] = set()  # kinds of forged notes

    def post(self, kind: str, number: int, rank: int, data: bytes) -> None:
        """Leave a rank's note of a kind, on a step for one. At most MOST_BYTES."""
        name = f"{kind}/{number}/{rank}"
        self._store.set(name, self._seal.close(name, rank, data))
        self._store.check([name])  # set() alone does not notice that nobody takes it

    def poll(self, kind: str, number: int, rank: int) -> bytes | None:
        """Return such a note of that rank, None while there is none. Never waits."""
        name = f"{kind}/{number}/{rank}"
        note = read(self._store, name)
        if note is None:
            return None
        opened = self._seal.open(name, note)
        if opened is None or opened[0] != rank:
            self._ignore(kind, name, note, b"")
            return None
        return opened[1]

    def first(self, kind: str, number: int, rank: int, data: bytes) -> tuple[int, bytes]:
        """Leave a note unless another rank was first; return the rank and data of the first."""
        name = f"{kind}/{number}"
        mine = self._seal.close(name, rank, data)
        note = self._store.compare_set(name, "", mine)
        opened = self._seal.open(name, note)
        if opened is None:
            self._ignore(kind, name, note, mine)
            return rank, data
        return opened

    def remove(self, kind: str, number: int, rank: int) -> None:
        """Remove a note that was read, to keep the store small."""
        self._store.delete_key(f"{kind}/{number}/{rank}")

    def refusal(self, text: str) -> ConfigError | PeerLostError:
        """See Seal.refusal()."""
        return self._seal.refusal(text)

    def _ignore(self, kind: str, name: str, forged: bytes, instead: bytes) -> None:
        """Say it, and replace it unless the real one came meanwhile: it may be large."""
        if len(forged) > MOST_BYTES:
            self._store.delete_key(name)
        else:
            self._store.compare_set(name, forged, instead)
        if kind not in self._said:
            self._said.add(kind)
            say(self._rank, forgery(name))


def forgery(name: str) -> str:
    """Word what a stranger has written in the store."""
    return (
        f"warning: ignored a forged {name} in torch's store: no rank of this job wrote it, so"
        " somebody else reaches its port. Does the network plugin enforce NetworkPolicies?"
    )
