"""A board in torch's store, as the ranks of a job with a token have it."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ddpjob_trainer.comm.sealed import Board, Seal
from ddpjob_trainer.environment import Identity, StoreKey, round_secret

OWN = Identity("3b1f0c52-uid", 2, 0, unique=True)


def seal(token: str = "t0ken", own: Identity = OWN, run: int = 0) -> Seal:
    secret = round_secret(token, own.uid, own.attempt, own.round)
    return Seal(StoreKey(secret, final=bool(token)), own, run)


def board(store: Store | None = None, rank: int = 0, run: int = 0) -> Board:
    """That of one rank. ``store``: the whole one, in which strangers write, too."""
    own = seal(run=run)
    return Board(PrefixStore(own.prefix, store or HashStore()), own, rank)
