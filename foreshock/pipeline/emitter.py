"""From the training loop to the hub: a bounded queue and one daemon thread, or inline where `sync` is asked for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from foreshock.pipeline.events import Event

log = logging.getLogger("foreshock")

Job = Callable[[], Event | None]
"""Makes its event when run: a frame's float64 work happens here, off the training thread."""


class Emitter:
    """Hands events to `sink` in order, never blocking and never raising into the training step.

    Frames are dropped, oldest first, beyond `capacity`; events that carry decisions are never dropped.
    """

    def __init__(self, sink: Callable[[Event], None], *, sync: bool, capacity: int = 4096) -> None:
        self._sink = sink
        self._sync = sync
        self._capacity = capacity
        self._frames = 0
        self._queue: deque[tuple[bool, Job]] = deque()
        self._wake = threading.Condition()
        self._closing = self._busy = False
        self.dropped = 0
        self.failure: str | None = None
        self._thread: threading.Thread | None = None
        if not sync:
            self._thread = threading.Thread(target=self._run, name="foreshock-emitter", daemon=True)
            self._thread.start()

    def put(self, job: Job, *, frame: bool = False) -> None:
        if self._sync:
            self._do(job)
            return
        with self._wake:
            if frame and self._frames >= self._capacity:
                oldest = next(i for i, (is_frame, _) in enumerate(self._queue) if is_frame)
                del self._queue[oldest]
                self._frames -= 1
                self.dropped += 1
            self._queue.append((frame, job))
            self._frames += frame
            self._wake.notify()

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything put so far was delivered; False after `timeout` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Deliver what is queued, then stop. Gives up after `timeout` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                frame, job = self._queue.popleft()
                self._frames -= frame
                self._busy = True
            self._do(job)
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def _do(self, job: Job) -> None:
        try:
            event = job()
            if event is not None:
                self._sink(event)
        except Exception as error:
            if self.failure is None:
                log.exception("Foreshock lost a measurement; training goes on")
            self.failure = f"{type(error).__name__}: {error}"
