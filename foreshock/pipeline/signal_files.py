"""Signals at rest: the frames that passed the hub, as wide Parquet for reports and notebooks.

Beside the road, written by the hub's shell. The journal is what is replayed; these parts hold the same
numbers by column, so losing one loses a picture, not a decision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreshock.signals import SignalFrame, SignalTable

if TYPE_CHECKING:
    import pyarrow as pa

PART_ROWS = 4096
PART_BYTES = 64 << 20
"""A part is written at whichever comes first, so a wide table cannot grow the buffer."""

PLACE = {"attempt": "int32", "rank": "int32", "seq": "int64", "timeline": "int32", "step": "int64"}


class SignalWriter:
    """Buffers frames of one table and writes them to `directory`/signals/part-<first seq>.parquet.

    A row a frame: run, attempt, rank, seq, timeline, step, then a float32 column a value (NaN = not
    measured, infinity = measured and not finite), int64 a count, float64 a sum, each named str(key).
    Raises ValueError for a frame of another table or for two keys of one name; OSError if a part cannot be
    written, whose frames are then dropped and counted in `lost`.
    """

    def __init__(self, directory: Path, table: SignalTable) -> None:
        self._directory, self._table = Path(directory) / "signals", table
        self._floats = [str(key) for key in (*table.values, *table.sums)]
        names = [*self._floats, *map(str, table.counts), "run", *PLACE]
        if len(set(names)) != len(names):
            raise ValueError("two signal keys of the table have the same name")
        width = 96 + 5 * len(table.values) + 8 * len(table.counts) + 8 * len(table.sums)
        self._rows = max(1, min(PART_ROWS, PART_BYTES // width))
        self._frames: list[SignalFrame] = []
        self.lost = 0

    def append(self, frame: SignalFrame) -> None:
        """Takes one frame; writes a part when the buffer is full."""
        if frame.table != self._table.id:
            raise ValueError(f"frame of table {frame.table}, this writer is for {self._table.id}")
        self._frames.append(frame)
        if len(self._frames) >= self._rows:
            self.flush()

    def flush(self) -> None:
        """Writes what is buffered as one part, whole or not at all."""
        import pyarrow.parquet as pq

        frames, self._frames = self._frames, []
        if not frames:
            return
        encoding = dict.fromkeys(self._floats, "BYTE_STREAM_SPLIT")
        encoding |= dict.fromkeys(("seq", "step"), "DELTA_BINARY_PACKED")
        form = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            part = self._free_name(frames[0].seq)
            draft = part.with_suffix(".tmp")
            pq.write_table(self._columns(frames), draft, column_encoding=encoding, **form)
            draft.replace(part)
        except OSError:
            self.lost += len(frames)
            raise

    close = flush

    def _columns(self, frames: list[SignalFrame]) -> pa.Table:
        import pyarrow as pa

        columns = {"run": pa.array([f.run for f in frames])}
        for name, kind in PLACE.items():
            columns[name] = pa.array([getattr(f, name) for f in frames], kind)
        values, counts, sums, nonfinite = (
            np.stack([getattr(f, part) for f in frames]).T
            for part in ("values", "counts", "sums", "nonfinite")
        )
        values[nonfinite == 1] = np.inf
        keys = (self._table.values, self._table.counts, self._table.sums)
        for part, rows in zip(keys, (values, counts, sums), strict=True):
            columns |= {
                str(key): pa.array(np.ascontiguousarray(row)) for key, row in zip(part, rows, strict=True)
            }
        return pa.table(columns, metadata={"foreshock.table": json.dumps(self._table.to_json())})

    def _free_name(self, seq: int) -> Path:
        # Ranks number their frames alike, so two parts may begin with one seq; none is ever overwritten.
        part, again = self._directory / f"part-{seq:012d}.parquet", 0
        while part.exists():
            again += 1
            part = part.with_name(f"part-{seq:012d}-{again}.parquet")
        return part


def read(directory: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """All parts under `directory`/signals as one table, in order of their first seq.

    A column that a part lacks, because its attempt had another table, is null there. Raises KeyError for a
    column that no part has, FileNotFoundError where there are no parts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = (Path(directory) / "signals").glob("part-*.parquet")
    parts = sorted(files, key=lambda part: [int(n) for n in re.findall(r"\d+", part.stem)])
    if not parts:
        raise FileNotFoundError(f"no signals under {directory}")
    has = {part: pq.read_schema(part).names for part in parts}
    if unknown := set(columns or ()).difference(*has.values()):
        raise KeyError(f"no such signal: {', '.join(sorted(unknown))}")
    wanted = {
        part: names if columns is None else [c for c in columns if c in names] for part, names in has.items()
    }
    tables = [pq.read_table(part, columns=names).replace_schema_metadata() for part, names in wanted.items()]
    merged = pa.concat_tables(tables, promote_options="default")
    return merged if columns is None else merged.select(list(columns))
