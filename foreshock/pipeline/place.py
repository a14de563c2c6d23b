"""Which rank of which world this process is, and how the ranks of one attempt meet without a collective.

They meet over the store with which torch.distributed itself was set up. Under torchrun that store belongs to the
agent and outlives a restart, with every word of the attempt before still in it (measured, torch 2.13; the restart
count differs between nodes when a node is replaced, pytorch issue 135712). So rank 0 draws a name for the attempt
and tells it only to ranks that ask with a fresh nonce; everything else is said under that name.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any

_watches = itertools.count()
"""Meetings of this process so far. All ranks call `watch` in the same order, so they count alike."""


@dataclass(frozen=True, slots=True)
class Place:
    """`node` counts machines from 0; `local_rank` counts ranks on one machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: int = 0


def here() -> Place:
    """This process's place in torch.distributed's default group; alone if there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Place()
    rank = dist.get_rank()
    # torchrun and Ray Train set LOCAL_RANK; the node is GROUP_RANK in the first, NODE_RANK in the second.
    local = _environment("LOCAL_RANK", "SLURM_LOCALID", default=rank)
    return Place(rank, dist.get_world_size(), local, _environment("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"))


class Meeting:
    """Words between the ranks of one attempt: each is said once, by one rank, and heard by any.

    `nonce` is the attempt's name, alike on all its ranks and never used before. The constructor waits until every
    rank has come. Raises TimeoutError (who did not, within `timeout` seconds) and RuntimeError (no usable store).
    """

    def __init__(self, place: Place, timeout: float = 60.0) -> None:
        self.nonce = secrets.token_hex(8)
        self._words: dict[str, str] = {}
        self._store = _default_store() if place.world > 1 else None
        if self._store is None:
            return
        asks = f"foreshock/{next(_watches)}/ask/"
        if place.rank == 0:
            self._answer({rank: f"{asks}{rank}" for rank in range(1, place.world)}, timeout)
            return
        self._set(f"{asks}{place.rank}", self.nonce)
        self.nonce = self._wait(
            f"foreshock/answer/{self.nonce}", timeout, "rank 0 did not call foreshock.watch"
        )
        self._set(f"{asks}{place.rank}", "")

    def say(self, key: str, word: dict[str, Any]) -> None:
        self._set(f"foreshock/{self.nonce}/{key}", json.dumps(word))

    def hear(self, key: str, timeout: float = 60.0) -> dict[str, Any]:
        """The word said under `key`. Raises TimeoutError if nobody says it within `timeout` seconds."""
        word: dict[str, Any] = json.loads(
            self._wait(f"foreshock/{self.nonce}/{key}", timeout, f"no rank said {key!r}")
        )
        return word

    def _answer(self, asks: dict[int, str], timeout: float) -> None:
        """Until every rank took its answer. What a dead attempt asked is answered too: nobody reads that."""
        deadline, answered, pause = time.monotonic() + timeout, dict[int, str](), 0.01
        while asks:
            for rank, key in list(asks.items()):
                asked = self._get(key)
                if asked and asked != answered.get(rank):
                    self._set(f"foreshock/answer/{asked}", self.nonce)
                    answered[rank] = asked
                elif not asked and rank in answered:
                    del asks[rank]
            if asks and time.monotonic() > deadline:
                raise TimeoutError(f"ranks {list(asks)} did not call foreshock.watch within {timeout:.0f} s")
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)

    def _wait(self, key: str, timeout: float, otherwise: str) -> str:
        """Polls, because a blocking wait would hold the store against torch's own threads."""
        deadline, pause = time.monotonic() + timeout, 0.01
        while (word := self._get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {timeout:.0f} s")
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)
        return word

    def _set(self, key: str, word: str) -> None:
        if self._store is None:
            self._words[key] = word
        else:
            self._store.set(key, word)

    def _get(self, key: str) -> str | None:
        if self._store is None:
            return self._words.get(key)
        return self._store.get(key).decode() if self._store.check([key]) else None


def _default_store() -> Any:
    """The default group's store: private in torch, held by a contract test."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        store.check(["foreshock"])
        return store
    except Exception as error:
        raise RuntimeError(f"the process group has no store to meet over: {error}") from error


def _environment(*names: str, default: int = 0) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), default)
