"""The hub as a Ray actor: named, detached, restarted by Ray, and the only one that decides for its run.

Ranks (or a node's relay) call `deliver`; whatever waits when the actor comes round is folded together, committed once
and only then acknowledged. So a rank that got no answer hands the same events in again, and nothing is lost or doubled.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from foreshock.pipeline import logs
from foreshock.pipeline.cluster.metrics import Metrics
from foreshock.pipeline.cluster.pace import Pace
from foreshock.pipeline.cluster.wire import Batch, Item, Reply, unpack
from foreshock.pipeline.events import Event, Frames, Hello, PolicyLoaded
from foreshock.pipeline.shell import Shell
from foreshock.signals import SignalFrame

log = logging.getLogger("foreshock")

NAMESPACE, PREFIX = "foreshock", "hub-"
IDLE_SECONDS = 600.0
GATHER_SECONDS = 0.02
"""So long a turn waits for calls to join it: each turn is one durable commit, and ranks call at about the same time."""
START_SECONDS = 60.0
TAKE_UP_SECONDS = 20.0


class HubActor:
    """Runs one `Shell`. Methods are coroutines on one loop; only `_turn` touches the shell's hub.

    The shell is closed when every rank has left, so that another process may take the run up; the actor itself stays
    for `idle` seconds, because the next attempt often follows soon.
    """

    def __init__(self, directory: str, run: str, idle: float = IDLE_SECONDS) -> None:
        self._directory, self._run, self._idle = Path(directory), run, idle
        self._metrics = Metrics(run)
        self._waiting: list[tuple[Batch, asyncio.Future[Reply]]] = []
        self._pump: asyncio.Task[None] | None = None
        self._present: set[int] = set()
        self._heard = time.monotonic()
        self._pace = Pace()
        self._ended: dict[str, Any] = {}
        """The last status of a record that is closed."""
        logs.configure()
        self._shell: Shell | None = self._open()
        self._attempt = self._shell.attempt
        logs.context.update(run=run, attempt=self._attempt, rank="hub")
        if self._greeted(self._shell):
            self._present = set(self._shell.hub.hello.ranks)  # type: ignore[union-attr]
        threading.Thread(target=self._watch, name="foreshock-idle", daemon=True).start()

    def _open(self) -> Shell:
        return Shell(self._directory, self._run, lambda command: self._metrics.issued(command))

    def _close(self) -> None:
        if self._shell is not None:
            self._ended = self._shell.status("ended")
            self._shell.close()
            self._shell = None

    async def begin(self, nonce: str, ranks: int) -> dict[str, Any]:
        """A new attempt of `ranks` ranks: its number and what stands. The same `nonce`, the same answer."""
        self._heard = time.monotonic()
        shell = self._shell = self._shell or self._open()
        while shell.failure is not None and time.monotonic() - self._heard < TAKE_UP_SECONDS:
            # What failed may be over, or is about to be: the hub of an attempt that was killed lives on for seconds.
            self._close()
            await asyncio.sleep(0.5)
            shell = self._shell = self._open()
        self._attempt = logs.context["attempt"] = shell.begin(nonce)
        self._present = set(range(ranks))
        return {
            "attempt": self._attempt,
            "standing": [list(item) for item in shell.hub.standing],
            "failure": shell.failure,
        }

    async def deliver(self, batch: Batch) -> Reply:
        """Take events of a rank or a relay. The answer comes when they are durable."""
        self._heard = time.monotonic()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((batch, answer))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._turns())
        return await answer

    async def _turns(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_SECONDS)
            taken, self._waiting = self._waiting, []
            try:
                self._turn([batch for batch, _ in taken])
                replies = [self._reply(batch) for batch, _ in taken]
            except Exception as error:  # a defect here must not leave ranks without an answer
                log.exception("the hub's actor failed on a delivery")
                replies = [Reply(failure=f"{type(error).__name__}: {error}") for _ in taken]
            for (_, answer), reply in zip(taken, replies, strict=True):
                if not answer.done():
                    answer.set_result(reply)

    def _turn(self, batches: list[Batch]) -> None:
        began = time.perf_counter()
        mine = [batch for batch in batches if batch.attempt == self._attempt]
        if self._shell is None and any(items for batch in mine for items in batch.items.values()):
            self._shell = self._open()
        if self._shell is None or not mine:
            return
        shell = self._shell
        shell.deliver(self._in_order(shell, mine))
        for batch in mine:
            if batch.facts is not None:
                shell.publish(batch.facts)
                self._metrics.voted(batch.facts.get("vote_seconds", 0.0))
            self._present -= set(batch.leaving)
        frames = sum(isinstance(item, bytes) for b in mine for items in b.items.values() for _, item in items)
        logs.context["step"] = shell.hub.step
        self._metrics.turn(shell.hub, frames, time.perf_counter() - began)
        if not self._present and any(batch.leaving for batch in mine):
            self._close()

    def _in_order(self, shell: Shell, batches: Iterable[Batch]) -> Iterator[tuple[Event, dict[str, int]]]:
        """The new events as far as ranks keep pace, with frames of all batches gathered into one event where order allows."""
        queues = [(source, deque(items)) for batch in batches for source, items in batch.items.items()]
        frames: list[SignalFrame] = []
        reached: dict[str, int] = {}
        newest, greeted, moved = dict(shell.hub.assembler.seen), self._greeted(shell), True
        while moved:
            moved, limit = False, self._limit(shell, newest)
            for source, items in queues:
                done = max(shell.delivered.get(source, 0), reached.get(source, 0))
                while items:
                    number, item = items[0]
                    if number > done:
                        if not greeted and not _greets(item):
                            break  # until the attempt's Hello was heard, only those who bring it are
                        if isinstance(item, bytes):
                            frame = SignalFrame.from_bytes(item)
                            if frame.seq > limit:
                                break
                            frames.append(frame)
                            newest[frame.rank], reached[source] = frame.seq, number
                        else:
                            if frames:
                                yield Frames(time.time(), tuple(frames)), reached
                                frames, reached = [], {}
                            yield unpack(item), {source: number}
                            if item[0] == Hello.__name__:
                                newest, greeted = {}, self._greeted(shell)
                                if not self._present:  # a hub that died before it heard this
                                    self._present = set(item[1]["ranks"])
                                limit = self._limit(shell, newest)
                        moved = True
                    items.popleft()
        if frames:
            yield Frames(time.time(), tuple(frames)), reached
        if not any(items for _, items in queues):
            self._pace.nobody_waits()

    def _limit(self, shell: Shell, newest: dict[int, int]) -> float:
        ranks = shell.hub.assembler.ranks
        return self._pace.limit(
            min((newest.get(rank, -1) for rank in ranks if rank in self._present), default=None)
        )

    def _greeted(self, shell: Shell) -> bool:
        hello = shell.hub.hello
        return hello is not None and hello.attempt == self._attempt

    def _reply(self, batch: Batch) -> Reply:
        if batch.attempt != self._attempt:
            return Reply(stale=True)
        if self._shell is None:
            return Reply(acked=dict.fromkeys(batch.items, 2**62))
        hub, shell = self._shell.hub, self._shell
        failing = shell.failure is not None
        command = (
            None if hub.command is None or failing or not self._greeted(shell) else hub.command.to_json()
        )
        return Reply(
            acked={source: shell.delivered.get(source, 0) for source in batch.items},
            command=command,
            acting=shell.acting,
            kept=sorted(hub.kept),
            failure=shell.failure,
        )

    async def status(self) -> dict[str, Any]:
        """What `foreshock status` shows, and the record's directory."""
        facts = self._ended if self._shell is None else self._shell.status()
        return {**facts, "directory": str(self._directory)}

    async def push(self, kind: str, payload: dict[str, Any]) -> int:
        """Leave a person's request, as `RunStore.push` does for those who see the run's directory."""
        if self._shell is None:
            raise ValueError("the run has ended")
        return self._shell.push(kind, payload)

    async def end(self) -> None:
        """Close the record and stop for good."""
        self._close()
        threading.Timer(0.2, self._exit).start()  # after this call was answered

    def _watch(self) -> None:
        while time.monotonic() - self._heard < self._idle:
            time.sleep(min(5.0, self._idle / 4))
        log.warning("the hub of %s was idle for %.0f s and ends; the record stays", self._run, self._idle)
        self._close()
        self._exit()

    def _exit(self) -> None:
        import ray

        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _greets(item: Item) -> bool:
    return not isinstance(item, bytes) and item[0] in (PolicyLoaded.__name__, Hello.__name__)


def name_of(directory: Path) -> str:
    """The actor's name: one a run directory, so two jobs on one cluster never meet."""
    return f"{PREFIX}{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]}"


def launch(directory: Path, run: str, kind: type = HubActor, **options: Any) -> Any:
    """The handle of the run's hub, which is started if there is none; on this node, where the directory is.

    Raises what Ray raises where it cannot be started, and TimeoutError after `START_SECONDS`.
    """
    return within(START_SECONDS, lambda: _launch(directory, run, kind, options))


def _launch(directory: Path, run: str, kind: type, options: dict[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = (
        ray.remote(kind)
        .options(
            name=name_of(directory), namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            max_restarts=-1, max_task_retries=0, max_concurrency=10_000, scheduling_strategy=here,
        )
        .remote(str(directory), run, **options)
    )  # fmt: skip
    ray.get(actor.__ray_ready__.remote(), timeout=START_SECONDS)
    return actor


def find(directory: Path) -> Any:
    """The handle of the run's hub. Raises ValueError where there is none, TimeoutError after `START_SECONDS`."""
    return named(name_of(directory))


def named(name: str) -> Any:
    """One of our actors by its name; raises as `find`."""
    import ray

    return within(START_SECONDS, lambda: ray.get_actor(name, namespace=NAMESPACE))


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, or TimeoutError: calls to a Ray whose head hangs never come back."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="foreshock-ray-call", daemon=True).start()
    return answer.result(seconds)
