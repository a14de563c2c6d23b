"""`ClosedStep` -> one vector of floats a detector: planned once, gathered in one index."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.signals import ClosedStep, Floats, Scope, SignalKey, SignalTable, measured_mean


@dataclass(frozen=True, slots=True)
class Stream:
    """One sequence of numbers: a column, of one rank (`rank` >= 0) or the mean over whoever measures it (-1)."""

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
    """One closed step, for any list of streams."""

    def __init__(self, closed: ClosedStep) -> None:
        self._values, self._mean = closed.values, measured_mean(closed.values)
        self._row = {rank: i for i, rank in enumerate(closed.ranks)}

    def read(self, columns: NDArray[np.intp], ranks: NDArray[np.intp], known: Sequence[int]) -> Floats:
        """(n,) values; `ranks` (n,) are indices into `known`, the ranks. NaN = not measured."""
        rows = np.array([self._row.get(rank, -1) for rank in known], dtype=np.intp)[ranks]
        shared = np.array([rank < 0 for rank in known], dtype=bool)[ranks]
        own = np.where(rows >= 0, self._values[rows, columns], np.nan)
        return np.where(shared, self._mean[columns], own)


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
