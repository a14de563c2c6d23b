"""The ground of the house: what a signal is called and how one step of measurements travels.

First stop of the road: monitors fill a `SignalFrame`, detectors read it. A `SignalTable` names the
columns once per attempt, so a frame is only arrays. numpy only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Scope(StrEnum):
    """How the values of one key relate across data-parallel ranks."""

    REPLICATED = "replicated"
    """The same on every rank, so one rank measures it (attention weights)."""
    SUMMED = "summed"
    """Counts and sums that merge exactly over ranks (router)."""
    PER_RANK = "per_rank"
    """Each rank's own (symptoms, the source probe)."""


@dataclass(frozen=True, order=True, slots=True)
class SignalKey:
    """The name of one stream.

    `layer` and `head` are indices or None where the signal is of the whole model or layer.
    `unit` is the physical unit or "1".
    """

    mechanism: str
    name: str
    layer: int | None = None
    head: int | None = None
    unit: str = "1"
    scope: Scope = Scope.REPLICATED

    def __str__(self) -> str:
        place = (
            ""
            if self.layer is None
            else f"[L{self.layer}" + ("]" if self.head is None else f".H{self.head}]")
        )
        return f"{self.mechanism}.{self.name}{place}"


@dataclass(frozen=True)
class SignalTable:
    """The ordered columns of one attempt's frames: point values, exact counts, exact sums."""

    values: tuple[SignalKey, ...]
    counts: tuple[SignalKey, ...] = ()
    sums: tuple[SignalKey, ...] = ()

    def __post_init__(self) -> None:
        every = [*self.values, *self.counts, *self.sums]
        if len(set(every)) != len(every):
            raise ValueError("a signal key occurs twice in the table")
        if any(k.scope is not Scope.SUMMED for k in (*self.counts, *self.sums)):
            raise ValueError("counts and sums must have scope summed")

    @cached_property
    def id(self) -> str:
        """Content hash: two tables with the same columns in the same order have the same id."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {part: [asdict(k) for k in getattr(self, part)] for part in ("values", "counts", "sums")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SignalTable:
        def keys(part: str) -> tuple[SignalKey, ...]:
            return tuple(SignalKey(**{**k, "scope": Scope(k["scope"])}) for k in data[part])

        return cls(keys("values"), keys("counts"), keys("sums"))


@dataclass(frozen=True, eq=False, slots=True)
class SignalFrame:
    """What one rank measured at one attempted optimizer step.

    `seq` counts frames of a rank and never repeats, also across rewinds; `timeline` counts rewinds;
    `step` is the trainer's step. `values` float32 (V,), NaN = not measured; `nonfinite` uint8 (V,),
    1 = measured as NaN or infinite (the value is then NaN); `counts` int64 (C,); `sums` float64 (S,).
    """

    run: str
    attempt: int
    rank: int
    seq: int
    timeline: int
    step: int
    table: str
    values: NDArray[np.float32]
    nonfinite: NDArray[np.uint8]
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]

    @classmethod
    def build(
        cls,
        values: Sequence[float] | NDArray[Any],
        *,
        counts: Sequence[int] = (),
        sums: Sequence[float] = (),
        **place: Any,
    ) -> SignalFrame:
        """A frame from raw numbers: NaN = not measured, infinite = measured and not finite.

        A number beyond float32's range counts as not finite too.
        """
        with np.errstate(over="ignore"):
            narrow = np.asarray(values, dtype=np.float64).astype(np.float32)
        return cls(
            values=np.where(np.isfinite(narrow), narrow, np.float32(np.nan)),
            nonfinite=np.isinf(narrow).astype(np.uint8),
            counts=np.asarray(counts, dtype=np.int64),
            sums=np.asarray(sums, dtype=np.float64),
            **place,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SignalFrame) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    def to_bytes(self) -> bytes:
        """Bit-exact encoding: one JSON line, then the four arrays, little-endian."""
        head = {
            "run": self.run,
            "attempt": self.attempt,
            "rank": self.rank,
            "seq": self.seq,
            "timeline": self.timeline,
            "step": self.step,
            "table": self.table,
            "n": [self.values.size, self.counts.size, self.sums.size],
        }
        parts = (
            self.values.astype("<f4"),
            self.nonfinite,
            self.counts.astype("<i8"),
            self.sums.astype("<f8"),
        )
        return json.dumps(head, sort_keys=True).encode() + b"\n" + b"".join(p.tobytes() for p in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> SignalFrame:
        """The inverse of `to_bytes`. Raises ValueError where the lengths do not fit."""
        line, _, body = data.partition(b"\n")
        head = json.loads(line)
        v, c, s = head.pop("n")
        if len(body) != 5 * v + 8 * c + 8 * s:
            raise ValueError("frame body does not fit its header")
        cuts = np.cumsum([0, 4 * v, v, 8 * c, 8 * s])
        arrays = [
            np.frombuffer(body[a:b], dtype=d).copy()
            for a, b, d in zip(cuts[:-1], cuts[1:], ("<f4", "u1", "<i8", "<f8"), strict=True)
        ]
        return cls(values=arrays[0], nonfinite=arrays[1], counts=arrays[2], sums=arrays[3], **head)


@dataclass(frozen=True, eq=False, slots=True)
class ClosedStep:
    """All frames of one step, merged: what detectors see.

    `ranks` (R,) sorted; `values` float32 and `nonfinite` uint8, both (R, V), row i is ranks[i];
    `counts` (C,) and `sums` (S,) are added over ranks.
    """

    step: int
    timeline: int
    ranks: tuple[int, ...]
    values: NDArray[np.float32]
    nonfinite: NDArray[np.uint8]
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]


def merge(frames: Iterable[SignalFrame]) -> ClosedStep:
    """Frames of one step, one table and different ranks as one `ClosedStep`.

    Integers are added exactly. Floating sums are added with `math.fsum`, which is correctly rounded, so the
    result does not depend on arrival order. Raises ValueError for no frames, mixed steps or a doubled rank.
    """
    rows = sorted(frames, key=lambda f: f.rank)
    if not rows:
        raise ValueError("nothing to merge")
    first = rows[0]
    ranks = tuple(f.rank for f in rows)
    if len(set(ranks)) != len(ranks):
        raise ValueError("a rank occurs twice in one step")
    if any((f.step, f.timeline, f.table) != (first.step, first.timeline, first.table) for f in rows):
        raise ValueError("frames of different steps, timelines or tables")
    return ClosedStep(
        step=first.step,
        timeline=first.timeline,
        ranks=ranks,
        values=np.stack([f.values for f in rows]),
        nonfinite=np.stack([f.nonfinite for f in rows]),
        counts=np.sum([f.counts for f in rows], axis=0, dtype=np.int64),
        sums=np.array([math.fsum(f.sums[i] for f in rows) for i in range(first.sums.size)], dtype=np.float64),
    )
