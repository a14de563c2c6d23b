"""A node's relay: merges the frames of its ranks, so that the hub hears one frame a node and not one a rank.

What decisions are made of (acknowledgements of commands, recovery points) passes through one by one. A rank's event is
acknowledged when the hub acknowledged what it became, so a relay that dies loses nothing: ranks hand it in again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreshock.pipeline.assembly import AHEAD
from foreshock.pipeline.cluster.actor import NAMESPACE, named
from foreshock.pipeline.cluster.pace import Pace
from foreshock.pipeline.cluster.wire import Batch, Item, Reply
from foreshock.pipeline.place import Meeting, Place
from foreshock.signals import SignalFrame, combine

log = logging.getLogger("foreshock")

RELAY_FROM = 5
"""Ranks on a node from which on it has a relay; fewer speak to the hub themselves."""
LINGER, POLL, ANSWER, PATIENCE = 0.05, 0.5, 10.0, 0.5
"""Seconds: between two deliveries, between two empty ones, for the hub's answer, and until a rank is answered."""


@dataclass
class _Rank:
    """What a rank handed in: `taken` up to this number; `open` what the hub has not acknowledged yet."""

    taken: int = 0
    newest: int | None = None
    """The number of its newest frame."""
    held: bool = False
    """Its last call was not taken whole."""
    here: bool = True
    open: deque[int] = field(default_factory=deque)
    done: set[int] = field(default_factory=set)

    @property
    def acked(self) -> int:
        """All its events up to this number are at the hub."""
        while self.open and self.open[0] in self.done:
            self.done.discard(self.open.popleft())
        return self.open[0] - 1 if self.open else self.taken


class Node:
    """The relay's book, without Ray: ranks' items in, numbered items for the hub out.

    The merged frame of step s is numbered by its `seq`, so that a relay that was started again goes on where it was.
    """

    def __init__(self, attempt: int, ranks: Sequence[int]) -> None:
        self.attempt, self.leader = attempt, min(ranks)
        self.source = f"{attempt}/node-{self.leader}"
        self.ranks = {f"{attempt}/{rank}": _Rank() for rank in ranks}
        self._pace, self._began = Pace(), math.inf
        self._steps: dict[tuple[int, int], dict[str, tuple[int, SignalFrame]]] = {}
        self._out: deque[tuple[str, int, Item, list[tuple[str, int]]]] = deque()
        """source, number, item, and which ranks' events it stands for."""

    def take(self, source: str, items: Sequence[tuple[int, Item]]) -> None:
        """Take what a rank hands in, as far as the ranks keep pace: the rest stays with it, unacknowledged."""
        rank = self.ranks[source]
        rank.held = False
        for number, item in items:
            if number <= rank.taken:
                continue
            if isinstance(item, bytes):
                frame = SignalFrame.from_bytes(item)
                if rank.newest is None:
                    rank.newest = frame.seq - 1
                    self._began = min(self._began, rank.newest)
                if frame.seq > self._pace.limit(self._behind()):
                    rank.held = True
                    break
                rank.newest = frame.seq
                self._steps.setdefault((frame.timeline, frame.step), {})[source] = (number, frame)
            else:
                self._out.append((source, number, item, [(source, number)]))
            rank.taken = number
            rank.open.append(number)
        if not any(rank.held for rank in self.ranks.values()):
            self._pace.nobody_waits()
        self._merge()

    def left(self, rank: int) -> None:
        """The rank hands in no more: the others wait for it no longer."""
        self.ranks[f"{self.attempt}/{rank}"].here = False

    def _behind(self) -> float | None:
        """The newest frame of the slowest rank; one that was not heard yet counts as where the others began."""
        newest = (rank.newest for rank in self.ranks.values() if rank.here)
        return min((self._began if n is None else n for n in newest), default=None)

    def _merge(self) -> None:
        """Steps that are complete, or that one rank has left `AHEAD` behind, in order."""
        newest: dict[int, int] = {}
        for timeline, step in self._steps:
            newest[timeline] = max(step, newest.get(timeline, step))
        for at in sorted(self._steps):
            timeline, step = at
            late = step + AHEAD <= newest[timeline] or timeline < max(newest)
            if len(self._steps[at]) < len(self.ranks) and not late:
                continue
            parts = self._steps.pop(at)
            merged = combine([frame for _, frame in parts.values()])
            seq = max(frame.seq for _, frame in parts.values())
            item = replace(merged, rank=self.leader, seq=seq).to_bytes()
            self._out.append((self.source, seq + 1, item, [(s, n) for s, (n, _) in parts.items()]))

    def waiting(self) -> dict[str, list[tuple[int, Item]]]:
        """What the hub must hear now, in order for each source."""
        items: dict[str, list[tuple[int, Item]]] = {}
        for source, number, item, _ in self._out:
            items.setdefault(source, []).append((number, item))
        return items

    def acknowledged(self, acked: dict[str, int]) -> None:
        left = deque[tuple[str, int, Item, list[tuple[str, int]]]]()
        for source, number, item, covers in self._out:
            if number > acked.get(source, 0):
                left.append((source, number, item, covers))
                continue
            for name, own in covers:
                self.ranks[name].done.add(own)
        self._out = left


class Relay:
    """The actor. `deliver` takes and answers what the hub's does."""

    def __init__(self, hub: Any, attempt: int, ranks: Sequence[int]) -> None:
        self._hub, self._node = hub, Node(attempt, ranks)
        self._last = Reply()
        self._facts: dict[str, Any] | None = None
        self._leaving: set[int] = set()
        self._turned = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._asked: tuple[Batch, asyncio.Future[Reply]] | None = None
        """The call that the hub has not answered yet. There is never a second one: each that waits costs memory there."""

    async def deliver(self, batch: Batch) -> Reply:
        if batch.attempt != self._node.attempt:
            return Reply(stale=True)
        if self._pump is None:
            self._pump = asyncio.create_task(self._turns())
        self._facts = batch.facts or self._facts
        self._leaving |= set(batch.leaving)
        for rank in batch.leaving:
            self._node.left(rank)
        for source, items in batch.items.items():
            self._node.take(source, items)
        wanted = {source: items[-1][0] for source, items in batch.items.items() if items}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            turned = self._turned
            await asyncio.wait([asyncio.ensure_future(turned.wait())], timeout=PATIENCE)
            if all(self._node.ranks[source].acked >= number for source, number in wanted.items()):
                break
        return replace(self._last, acked={s: self._node.ranks[s].acked for s in batch.items})

    async def _turns(self) -> None:
        heard = 0.0
        while True:
            items = self._node.waiting()
            if items or self._leaving or time.monotonic() - heard >= POLL:
                try:
                    await self._turn(items)
                except Exception as error:
                    log.error("the relay's hub does not answer: %s", error)
                    self._last = Reply(failure=None)
                    await asyncio.sleep(POLL)
                heard = time.monotonic()
                self._turned, turned = asyncio.Event(), self._turned
                turned.set()
            await asyncio.sleep(LINGER)

    async def _turn(self, items: dict[str, list[tuple[int, Item]]]) -> None:
        if self._asked is None:
            batch = Batch(
                self._node.attempt, items or {self._node.source: []}, self._facts, tuple(self._leaving)
            )
            self._asked = batch, asyncio.ensure_future(self._hub.deliver.remote(batch))
        batch, answer = self._asked
        await asyncio.wait([answer], timeout=ANSWER)
        if not answer.done():
            raise TimeoutError(f"no answer for {ANSWER:.0f} s")
        self._asked = None
        reply = answer.result()
        self._node.acknowledged(reply.acked)
        if self._facts is batch.facts:
            self._facts = None
        self._leaving -= set(batch.leaving)
        self._last = reply


def node_line(hub: Any, place: Place, meeting: Meeting, attempt: int) -> tuple[Any, tuple[int, ...]]:
    """Whom this rank speaks to: its node's relay where the node has many ranks, else the hub; and the ranks whose frames
    reach the hub (empty: all of them).

    Relays need nodes of one size, with consecutive ranks; elsewhere every rank speaks to the hub.
    """
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if size < RELAY_FROM or place.world % size or place.rank % size != place.local_rank:
        return hub, ()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    first = place.rank - place.local_rank
    name, key = f"relay-{meeting.nonce}-{first}", f"relay-{first}"
    if place.local_rank == 0:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        relay = (
            ray.remote(Relay)
            .options(
                name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=1000,
                scheduling_strategy=here,
            )
            .remote(hub, attempt, range(first, first + size))
        )  # fmt: skip
        ray.get(relay.__ray_ready__.remote(), timeout=60)
        _KEPT.append(relay)
        meeting.say(key, {"name": name})
    else:
        relay = named(meeting.hear(key)["name"])
    return relay, tuple(range(0, place.world, size))


_KEPT: list[Any] = []
"""An actor that is not detached ends with its last handle of the process that made it."""
