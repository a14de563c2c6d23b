"""The training data's position: what has been drawn, and how to draw it again after a rewind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreshock.remediation.live.state import rng_state, set_rng_state


class DataCursor:
    """Owns the iterator of one loader over `epochs` passes (None = without end).

    A loader with `state_dict`/`load_state_dict` is rewound by it. Any other re-iterable loader is rewound by the
    random state at its epoch's start and a skip of the batches drawn since. `why_not` says why neither works.
    """

    def __init__(self, loader: Any, epochs: int | None = 1) -> None:
        self.loader = loader
        self.epochs = epochs
        self.epoch = 0
        self.index = 0
        self.batches = 0
        """Batches drawn since the start of the run, skipped ones included; a rewind takes it back."""
        self.stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.why_not: str | None = None
        if not self.stateful and iter(loader) is loader:
            self.why_not = "the loader is a one-shot iterator without state_dict, so its batches cannot be drawn again"
        self._epoch_start: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
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
                if any(a <= self.batches - 1 < b for a, b in self._skips):
                    continue
                yield batch
                if self._moved:
                    break
            if not self._moved:
                self.epoch, self.index, self._iterator = self.epoch + 1, 0, None

    def position(self) -> dict[str, Any]:
        """Where the next batch comes from, storable by `flatten`."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "batches": self.batches,
            "start": self._epoch_start if self.index else None,
            "loader": self.loader.state_dict() if self.stateful else None,
        }

    def rewind(self, position: dict[str, Any], skip: tuple[int, int] | None = None) -> None:
        """Go back to `position`; batches numbered skip[0] to skip[1] (exclusive) will be passed over.

        May draw from the global random generators: restore them afterwards.
        """
        self.epoch, self.index, self.batches = position["epoch"], position["index"], position["batches"]
        self._moved, self._iterator = True, None
        if skip is not None:
            self._skips.append(skip)
        if self.stateful:
            self.loader.load_state_dict(position["loader"])
            self._iterator = iter(self.loader) if self.index else None
        elif self.index:
            self._epoch_start = position["start"]
            self._set_random(position["start"])
            self._iterator = iter(self.loader)
            for _ in range(self.index):
                next(self._iterator)

    def skip(self, count: int) -> None:
        """Pass over the next `count` batches."""
        self._skips.append((self.batches, self.batches + count))

    def _random(self) -> dict[str, Any]:
        own = getattr(self.loader, "generator", None)
        return {"global": rng_state(), "loader": None if own is None else own.get_state()}

    def _set_random(self, state: dict[str, Any]) -> None:
        set_rng_state(state["global"])
        if state["loader"] is not None:
            self.loader.generator.set_state(state["loader"])
