"""The training data's position: what has been drawn, and how to draw it again after a rewind."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreshock.remediation.live.state import rng_state, set_rng_state


class NotRewindable(Exception):
    """The loader does not give the same batches again."""


class DataCursor:
    """Owns the iterator of one loader over `epochs` passes (None = without end).

    A loader with `state_dict`/`load_state_dict` is rewound by it. Any other re-iterable loader is rewound by the
    random state at its epoch's start and a skip of the batches drawn since; the last of them must be the batch it
    was, or the rewind is refused. `why_not` says why neither works. `call` numbers the loops of a run: a position
    belongs to its own loop.
    """

    def __init__(self, loader: Any, epochs: int | None = 1, call: int = 1) -> None:
        self.call = call
        self.loader = loader
        self.epochs = epochs
        self.epoch = 0
        self.index = 0
        self.batches = 0
        """Batches drawn since the start of the run, skipped ones included; a rewind takes it back."""
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.why_not: str | None = None
        if not self.stateful and hasattr(loader, "__next__"):
            self.why_not = (
                "the loader is a one-shot iterator without state_dict, so its batches cannot be drawn again"
            )
        self._epoch_start: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._last: Any = None
        self._moved = False
        self._skips: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Any]:
        while self.epochs is None or self.epoch < self.epochs:
            self._moved = False
            if self._iterator is None:
                self._epoch_start = self._random()
                self._iterator = iter(self.loader)
            for batch in self._iterator:
                self.index += 1
                self.batches += 1
                self._last = batch
                if any(a <= self.batches - 1 < b for a, b in self._skips):
                    continue
                yield batch
                if self._moved:
                    break
            if not self._moved:
                if self.index == 0:
                    return  # an empty loader has no further epoch either
                self.epoch, self.index, self._iterator = self.epoch + 1, 0, None

    def position(self) -> dict[str, Any]:
        """Where the next batch comes from, storable by `flatten`."""
        return {
            "call": self.call,
            "epoch": self.epoch,
            "index": self.index,
            "batches": self.batches,
            "start": self._epoch_start if self.index else None,
            "last": fingerprint(self._last) if self.index else None,
            "loader": self.loader.state_dict() if self.stateful else None,
        }

    def rewind(self, position: dict[str, Any], skip: tuple[int, int] | None = None) -> None:
        """Go back to `position`; batches numbered skip[0] to skip[1] (exclusive) will be passed over.

        May draw from the global random generators: restore them afterwards. Raises NotRewindable, and whatever
        the loader raises, before anything but the generators has changed.
        """
        iterator: Iterator[Any] | None = None
        if self.stateful:
            self.loader.load_state_dict(position["loader"])
            iterator = iter(self.loader) if position["index"] else None
        elif position["index"]:
            self._set_random(position["start"])
            iterator, last = iter(self.loader), None
            for _ in range(position["index"]):
                last = next(iterator, None)
            if fingerprint(last) != position["last"]:
                raise NotRewindable("the loader does not give the same batches again")
            self._epoch_start = position["start"]
        self.epoch, self.index, self.batches = position["epoch"], position["index"], position["batches"]
        self._moved, self._iterator = True, iterator
        if skip is not None:
            self._skips.append(skip)

    def hold(self) -> Callable[[], None]:
        """A function that puts the cursor and its loader back to where they are now."""
        mine = {**vars(self), "_skips": list(self._skips)}
        state = self.loader.state_dict() if self.stateful else None

        def back() -> None:
            vars(self).update(mine)
            if self.stateful:
                self.loader.load_state_dict(state)

        return back

    def skip(self, count: int) -> None:
        """Pass over the next `count` batches."""
        self._skips.append((self.batches, self.batches + count))

    def _generators(self) -> list[Any]:
        """The loader's own torch generators: its own, its sampler's, its batch sampler's."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        owners = (
            self.loader,
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        found = [g for owner in owners if (g := getattr(owner, "generator", None)) is not None]
        return list({id(g): g for g in found}.values())

    def _random(self) -> dict[str, Any]:
        return {"global": rng_state(), "loader": [g.get_state() for g in self._generators()]}

    def _set_random(self, state: dict[str, Any]) -> None:
        set_rng_state(state["global"])
        for generator, own in zip(self._generators(), state["loader"], strict=True):
            generator.set_state(own)


def fingerprint(batch: Any) -> int:
    """A checksum of a batch's CPU tensors, arrays and plain values; other things count as nothing."""
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":
            return 0
        return zlib.crc32(batch.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(batch, (np.ndarray, np.generic)):
        return zlib.crc32(batch.tobytes())
    if isinstance(batch, dict):
        return zlib.crc32(repr([(str(k), fingerprint(v)) for k, v in batch.items()]).encode())
    if isinstance(batch, (list, tuple)):
        return zlib.crc32(repr([fingerprint(v) for v in batch]).encode())
    return zlib.crc32(repr(batch).encode()) if isinstance(batch, (int, float, str, bytes)) else 0
