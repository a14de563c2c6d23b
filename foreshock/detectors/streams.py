"""`ClosedStep` -> one vector of floats a detector: planned once, gathered in one index."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.signals import ClosedStep, Floats, Scope, SignalKey, SignalTable


@dataclass(frozen=True, slots=True)
class Stream:
    """One sequence of numbers: a column, of one rank (`rank` >= 0) or of whichever rank measures it (-1)."""

    key: SignalKey
    column: int
    rank: int

    @property
    def signal(self) -> str:
        return f"{self.key.mechanism}.{self.key.name}"

    @property
    def layer(self) -> int:
        return -1 if self.key.layer is None else self.key.layer


def plan(
    table: SignalTable, signals: Collection[str], ranks: Collection[int], replicated: bool
) -> list[Stream]:
    """Streams of these signals: one a (key, rank), and one a key for replicated ones if wanted."""
    found = []
    for column, key in enumerate(table.values):
        if f"{key.mechanism}.{key.name}" in signals:
            if key.scope is Scope.PER_RANK:
                found += [Stream(key, column, rank) for rank in ranks]
            elif replicated:
                found.append(Stream(key, column, -1))
    return found


class Sheet:
    """One closed step, for any list of streams. Replicated keys are the mean over who measured them."""

    def __init__(self, closed: ClosedStep) -> None:
        values = closed.values.astype(np.float64)
        known = np.isfinite(values)
        count = known.sum(0)
        mean = np.where(known, values, 0.0).sum(0) / np.maximum(count, 1)
        absent = np.full(values.shape[1], np.nan)
        self._values = np.vstack([values, absent, np.where(count > 0, mean, np.nan)])
        self._row = {rank: i for i, rank in enumerate(closed.ranks)}
        self._row[-1] = len(closed.ranks) + 1

    def read(self, columns: NDArray[np.intp], ranks: NDArray[np.intp], known: Sequence[int]) -> Floats:
        """(n,) values; `ranks` (n,) are indices into `known`, the ranks. NaN = not measured."""
        absent = len(self._row) - 1
        rows = np.array([self._row.get(rank, absent) for rank in known])
        return np.asarray(self._values[rows[ranks], columns])


class Reader:
    """The planned index of several lists of streams, read at once."""

    def __init__(self, *lists: Sequence[Stream]) -> None:
        streams = [s for one in lists for s in one]
        ends = np.cumsum([0, *map(len, lists)])
        self._slices = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self._known = sorted({s.rank for s in streams})
        self._columns = np.array([s.column for s in streams], dtype=np.intp)
        self._ranks = np.array([self._known.index(s.rank) for s in streams], dtype=np.intp)

    def __call__(self, sheet: Sheet) -> list[Floats]:
        """One vector (n,) a list."""
        values = sheet.read(self._columns, self._ranks, self._known)
        return [values[part] for part in self._slices]


def index_by(labels: Sequence[Hashable]) -> tuple[NDArray[np.intp], list[Hashable]]:
    """(n,) group numbers in order of first appearance, and the groups: appending renumbers nothing."""
    groups = dict.fromkeys(labels)
    number = {label: i for i, label in enumerate(groups)}
    return np.array([number[label] for label in labels], dtype=np.intp), list(groups)


def group_mean(values: Floats, owner: NDArray[np.intp], owners: int) -> Floats:
    """(owners,) mean of the values (n,) that are not NaN; NaN where there is none."""
    known = ~np.isnan(values)
    count = np.bincount(owner, weights=known, minlength=owners)
    total = np.bincount(owner, weights=np.where(known, values, 0.0), minlength=owners)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
