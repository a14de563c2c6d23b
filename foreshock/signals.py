"""The ground of the house: what a signal is called and how one step of measurements travels.

First stop of the road: monitors fill a `SignalFrame`, detectors read it. A `SignalTable` names the
columns once per attempt, so a frame is only arrays. numpy only.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_HEAD = struct.Struct("<5q5I?")


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
        """Bit-exact encoding, little-endian: numbers and names, a bit a value that was measured, those values,
        counts and sums, and, where any is set, a bit a value for `nonfinite`. Every NaN becomes the same NaN."""
        run, table = self.run.encode(), self.table.encode()
        measured, flagged = ~np.isnan(self.values), np.count_nonzero(self.nonfinite) > 0
        place = (self.attempt, self.rank, self.seq, self.timeline, self.step)
        sizes = (self.values.size, self.counts.size, self.sums.size, len(run), len(table))
        parts = (
            _HEAD.pack(*place, *sizes, flagged),
            run,
            table,
            np.packbits(measured).tobytes(),
            self.values[measured].astype("<f4").tobytes(),
            self.counts.astype("<i8").tobytes(),
            self.sums.astype("<f8").tobytes(),
            np.packbits(self.nonfinite).tobytes() if flagged else b"",
        )
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> SignalFrame:
        """The inverse of `to_bytes`. Raises ValueError where the lengths do not fit."""
        if len(data) < _HEAD.size:
            raise ValueError("frame is shorter than its header")
        attempt, rank, seq, timeline, step, v, c, s, run, table, flagged = _HEAD.unpack_from(data)
        names, mask = _HEAD.size + run, -(-v // 8)
        at = names + table
        measured = np.unpackbits(np.frombuffer(data, np.uint8, mask, at), count=v).view(np.bool_)
        known, at = int(np.count_nonzero(measured)), at + mask
        ends = at + 4 * known, at + 4 * known + 8 * c, at + 4 * known + 8 * (c + s)
        if len(data) != ends[2] + mask * flagged:
            raise ValueError("frame body does not fit its header")
        values = np.full(v, np.nan, dtype=np.float32)
        values[measured] = np.frombuffer(data, "<f4", known, at)
        nonfinite = np.zeros(v, dtype=np.uint8)
        if flagged:
            nonfinite = np.unpackbits(np.frombuffer(data, np.uint8, mask, ends[2]), count=v)
        return cls(
            data[_HEAD.size : names].decode(),
            attempt,
            rank,
            seq,
            timeline,
            step,
            data[names : names + table].decode(),
            values,
            nonfinite,
            np.frombuffer(data, "<i8", c, ends[0]).astype(np.int64),
            np.frombuffer(data, "<f8", s, ends[1]).astype(np.float64),
        )


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
    ranks = tuple(f.rank for f in rows)
    if len(set(ranks)) != len(ranks):
        raise ValueError("a rank occurs twice in one step")
    if len({(f.attempt, f.timeline, f.step, f.table) for f in rows}) > 1:
        raise ValueError("frames of different attempts, timelines, steps or tables")

    def stacked(part: str) -> NDArray[Any]:  # np.stack is slow for thousands of short arrays
        return np.concatenate([getattr(f, part) for f in rows]).reshape(len(rows), -1)

    return ClosedStep(
        step=rows[0].step,
        timeline=rows[0].timeline,
        ranks=ranks,
        values=stacked("values"),
        nonfinite=stacked("nonfinite"),
        counts=stacked("counts").sum(axis=0),
        sums=np.array([_fsum(column) for column in stacked("sums").T], dtype=np.float64),
    )


def combine(frames: Sequence[SignalFrame]) -> SignalFrame:
    """Frames of one step of a node's ranks as one frame, in the name of the lowest rank among them.

    Counts are added exactly. Sums are correctly rounded here and again where frames of nodes are merged, so a
    tree of relays may differ from one flat sum in the last bit. A value is the mean over those who measured it
    (one that a single rank measured stays bit-equal), and nonfinite where it was on any rank: one bad rank is
    from here on known by its node's lowest rank. Raises ValueError as `merge` does.
    """
    if len(frames) == 1:
        return frames[0]
    closed = merge(frames)
    nonfinite = closed.nonfinite.max(axis=0)
    values = measured_mean(closed.values).astype(np.float32)
    return replace(
        min(frames, key=lambda f: f.rank),
        values=np.where(nonfinite, np.float32(np.nan), values),
        nonfinite=nonfinite,
        counts=closed.counts,
        sums=closed.sums,
    )


def measured_mean(values: NDArray[np.float32]) -> Floats:
    """(V,) float64 mean of every column of (R, V) over the rows that measured it; NaN where none did."""
    known = np.isfinite(values)
    count = np.count_nonzero(known, axis=0)
    # -0.0 is the neutral start: with 0.0 a lone -0.0 would lose its sign
    total = np.add.reduce(values, axis=0, dtype=np.float64, initial=-0.0, where=known)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _fsum(column: Iterable[float]) -> float:
    try:
        return math.fsum(column)
    except (ValueError, OverflowError):  # infinities of both signs, or beyond float64
        return math.nan
