"""Frames written to Parquet come back bit for bit, in parts of bounded size, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from foreshock.pipeline import signal_files
from foreshock.pipeline.signal_files import SignalWriter, read
from foreshock.signals import Scope, SignalFrame, SignalKey, SignalTable

H1 = SignalKey("attention", "h1", 3, 1)
LOSS = SignalKey("symptoms", "loss", unit="nat", scope=Scope.PER_RANK)
TOKENS = SignalKey("router", "tokens", 2, scope=Scope.SUMMED)
ENTROPY = SignalKey("router", "entropy", 2, unit="nat", scope=Scope.SUMMED)
TABLE = SignalTable((H1, LOSS), (TOKENS,), (ENTROPY,))


def frame(seq: int, table: SignalTable = TABLE, **place: object) -> SignalFrame:
    rng = np.random.default_rng(seq)
    values = rng.normal(size=len(table.values)).astype(np.float32)
    if seq % 3 == 0:
        values[0] = np.nan if seq % 2 else np.inf
    at = {"run": "r", "attempt": 1, "rank": 0, "seq": seq, "timeline": 0, "step": 2 * seq} | place
    counts = [2**53 + seq] * len(table.counts)
    sums = [rng.normal() * 1e-30] * len(table.sums)
    return SignalFrame.build(values, counts=counts, sums=sums, table=table.id, **at)


def test_frames_come_back_bit_for_bit_and_nonfinite_is_told_from_not_measured(tmp_path: Path) -> None:
    writer = SignalWriter(tmp_path, TABLE)
    frames = [frame(seq) for seq in range(20)]
    for f in frames:
        writer.append(f)
    writer.close()
    table = read(tmp_path)
    assert table.column_names == ["run", *signal_files.PLACE, *map(str, (H1, LOSS, TOKENS, ENTROPY))]
    types = [str(table.schema.field(str(key)).type) for key in (H1, LOSS, TOKENS, ENTROPY)]
    assert types == ["float", "float", "int64", "double"]
    assert table["step"].to_pylist() == [f.step for f in frames]
    h1 = table[str(H1)].to_numpy()
    for row, f in zip(h1, frames, strict=True):
        if f.nonfinite[0]:
            assert np.isinf(row)
        else:
            assert np.float32(row).tobytes() == f.values[0].tobytes()
    assert np.isinf(h1).sum() > 0
    assert np.isnan(h1).sum() > 0
    assert table[str(TOKENS)].to_pylist() == [int(f.counts[0]) for f in frames]
    assert table[str(ENTROPY)].to_pylist() == [float(f.sums[0]) for f in frames]


def test_parts_are_bounded_by_rows_and_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_files, "PART_ROWS", 4)
    writer = SignalWriter(tmp_path, TABLE)
    for seq in range(10):
        writer.append(frame(seq))
    assert sorted(p.name for p in (tmp_path / "signals").iterdir()) == [
        "part-000000000000.parquet",
        "part-000000000004.parquet",
    ]
    writer.close()
    writer.close()
    assert read(tmp_path, ["seq"])["seq"].to_pylist() == list(range(10))
    monkeypatch.setattr(signal_files, "PART_BYTES", 300)
    narrow = SignalWriter(tmp_path / "narrow", TABLE)
    for seq in range(3):
        narrow.append(frame(seq))
    assert len(list((tmp_path / "narrow" / "signals").iterdir())) == 1


def test_the_layout_on_disk_is_the_measured_one(tmp_path: Path) -> None:
    writer = SignalWriter(tmp_path, TABLE)
    for seq in range(5):
        writer.append(frame(seq))
    writer.close()
    part = pq.ParquetFile(tmp_path / "signals" / "part-000000000000.parquet")
    group = part.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    assert not any("DICTIONARY" in e for c in columns.values() for e in c.encodings)
    assert "BYTE_STREAM_SPLIT" in columns[str(H1)].encodings
    assert "DELTA_BINARY_PACKED" in columns["step"].encodings
    assert b"foreshock.table" in part.schema_arrow.metadata


def test_parts_of_another_table_and_equal_first_seq_stand_side_by_side(tmp_path: Path) -> None:
    other = SignalTable((LOSS,))
    for table, rank in ((TABLE, 0), (TABLE, 1), (other, 2)):
        writer = SignalWriter(tmp_path, table)
        writer.append(frame(7, table, rank=rank))
        writer.close()
    table = read(tmp_path)
    assert table["rank"].to_pylist() == [0, 1, 2]
    assert table[str(TOKENS)].to_pylist()[2] is None
    assert read(tmp_path, [str(TOKENS), "rank"]).column_names == [str(TOKENS), "rank"]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same name"):
        SignalWriter(tmp_path, SignalTable((LOSS, SignalKey("symptoms", "loss"))))
    writer = SignalWriter(tmp_path, TABLE)
    with pytest.raises(ValueError, match="table"):
        writer.append(frame(1, SignalTable((LOSS,))))
    with pytest.raises(FileNotFoundError, match="no signals"):
        read(tmp_path)
    writer.append(frame(1))
    writer.close()
    with pytest.raises(KeyError, match="nothing"):
        read(tmp_path, ["nothing"])


def test_a_part_that_cannot_be_written_is_counted_and_the_next_one_is_written(tmp_path: Path) -> None:
    writer = SignalWriter(tmp_path, TABLE)
    (tmp_path / "signals").write_text("in the way")
    writer.append(frame(1))
    with pytest.raises(OSError, match="signals"):
        writer.flush()
    assert writer.lost == 1
    (tmp_path / "signals").unlink()
    writer.append(frame(2))
    writer.close()
    assert read(tmp_path)["seq"].to_pylist() == [2]
