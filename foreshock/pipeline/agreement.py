"""How the ranks of one attempt agree on a command: `Group` over a gloo group of its own, `Alone` for one rank.

Both have the same face. `offer`, `prepared`, `withdraw` and `wanted` may be called from any thread; `decide`,
`confirm` and `close` belong to the training thread. The rules are in `foreshock.remediation.commit`; here are only
the collectives, their bounded waits and a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from foreshock.remediation.commit import CADENCE, Vector, Voter

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

BOUNDS = (5.0, 60.0)
"""Seconds that a step may wait: for a vote, and for the other ranks to have applied (a rollback loads slowly)."""

SKEW = 600.0
"""Seconds after which gloo gives up an operation that some rank never joined. Far above our waits: a rank may come
late to a vote (it saved a checkpoint) while the others are busy elsewhere, and nothing is lost."""


class Alone:
    """One rank decides by itself, in any step; or nothing, where it has peers and no group (`disabled` says why)."""

    vote_seconds = 0.0

    def __init__(self, disabled: str | None = None) -> None:
        self._voter = Voter(disabled=disabled)
        self._lock = threading.Lock()

    @property
    def disabled(self) -> str | None:
        """Why this rank applies nothing more in this attempt; None while it does."""
        return self._voter.disabled

    def offer(self, number: int) -> bool:
        """True: prepare command `number`. False: known, over, or nothing more is applied here."""
        with self._lock:
            return self._voter.offer(number)

    def prepared(self, number: int, expires: int) -> None:
        """Command `number` can be applied from now on, at frame `expires` at the latest."""
        with self._lock:
            self._voter.prepared(number, expires)

    def withdraw(self, number: int) -> None:
        """Command `number` is refused here or withdrawn by the hub. A vote in flight may still decide it."""
        with self._lock:
            self._voter.withdraw(number)

    def wanted(self, number: int) -> bool:
        """Whether command `number` may still be decided; if not, what was prepared for it can be dropped."""
        with self._lock:
            return self._voter.wanted(number)

    def decide(self, seq: int, acting: bool) -> int | None:
        """The number of the command to apply now, or None. Once in every step."""
        with self._lock:
            return self._voter.count(self._voter.ballot(seq, acting))

    def confirm(self, ok: bool) -> bool:
        """Whether what `decide` returned is now applied everywhere."""
        return ok

    def close(self) -> None:
        """Nothing is open."""


class Group(Alone):
    """All ranks of the attempt, over `group`: a gloo group that is used for nothing else."""

    def __init__(self, group: ProcessGroup, bounds: tuple[float, float] = BOUNDS) -> None:
        super().__init__()
        self._group, self._bounds, self._closed = group, bounds, False
        self._vote: tuple[Any, Tensor] | None = None
        self._casts: list[Any] = []
        # The end of a gloo group waits for its operations, also at exit. It lives until `close` finds none.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    @classmethod
    def open(cls, name: str, timeout: float = 60.0, bounds: tuple[float, float] = BOUNDS) -> Self:
        """Make the group: a collective over the default one. Raises what torch raises after `timeout` seconds."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _set_pg_timeout

        described = f"foreshock {name}"
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc=described)
        _set_pg_timeout(timedelta(seconds=SKEW), group)
        return cls(group, bounds)

    def decide(self, seq: int, acting: bool) -> int | None:
        """Once in every step, on every rank, also where `acting` is False.

        Reads the vote in flight and casts one where it is due. Returns the number of the command that every rank
        applies in this step; `confirm` must follow. Waits at most the vote's bound and never raises: what goes
        wrong disables acting for this attempt.
        """
        number = None
        try:
            if self._vote is not None:
                began, vote, self._vote = time.perf_counter(), self._vote, None
                try:
                    result = self._wait(vote, self._bounds[0])
                finally:
                    self.vote_seconds = time.perf_counter() - began
                with self._lock:
                    number = self._voter.count(result)
            if number is None and self.disabled is None and seq % CADENCE == 0:
                with self._lock:
                    ballot = self._voter.ballot(seq, acting)
                self._vote = self._cast(ballot)
        except Exception as error:
            self._leave(f"a vote was lost: {error}")
        return number

    def confirm(self, ok: bool) -> bool:
        """Whether it is now applied on all ranks (True) or failed on all with nothing changed (False).

        `ok` says how it went here. Raises Unconfirmed if the ranks differ, or if that is not known in time.
        """
        try:
            result = self._wait(self._cast(self._voter.confirmation(ok)), self._bounds[1])
        except Exception as error:
            self._voter.unconfirmed(str(error))
        return self._voter.confirmed(result)

    def close(self) -> None:
        """Leave the group. Waits at most the vote's bound and never raises."""
        import torch.distributed as dist

        if self._closed:
            return
        self._closed = True
        if self.disabled is None:
            self._leave("closed")
        end = time.perf_counter() + self._bounds[0]
        for work in self._casts:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(end - time.perf_counter(), 0.001)))
        if all(work.is_completed() for work in self._casts):
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            with contextlib.suppress(Exception):  # the trainer may have destroyed all groups before
                dist.destroy_process_group(self._group)

    def _cast(self, vector: Vector) -> tuple[Any, Tensor]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(vector, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._casts = [w for w in self._casts if not w.is_completed()] + [work]
        return work, tensor

    def _wait(self, cast: tuple[Any, Tensor], seconds: float) -> list[int]:
        work, tensor = cast
        work.wait(timedelta(seconds=seconds))
        result: list[int] = tensor.tolist()
        return result

    def _leave(self, reason: str) -> None:
        with self._lock:
            word = self._voter.leave(reason)
        with contextlib.suppress(Exception):
            self._cast(word)
