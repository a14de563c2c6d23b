"""`foreshock audit` shows, judges and exports the record, and finds the run it was asked for."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from foreshock.cli.audit import app
from foreshock.pipeline.store import RunStore

COLUMNS = ["sequence", "event", "time", "kind", "payload", "previous", "hash"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "foreshock_runs" / "night"
    with RunStore(path) as store:
        for n in range(6):
            with store.transaction():
                event = store.append_event("frames", {}, b"")
                store.append_audit(
                    event, 1e9 + n, "alarm" if n % 2 else "decision", {"signal": "h1[L3]", "n": n}
                )
    return path


def foreshock(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "160"})


def break_record(run: Path, sequence: int) -> None:
    with closing(sqlite3.connect(run / "run.db")) as database, database:
        database.execute("UPDATE audit SET time = 'noon', payload = '[' WHERE sequence = ?", [sequence])


def test_show_prints_the_newest_records_last_with_their_payloads_unharmed(run: Path) -> None:
    result = foreshock("show", "night", "--limit", "2")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "h1[L3]" in line]
    assert ['"n": 4' in lines[0], '"n": 5' in lines[1], len(lines)] == [True, True, 2]
    assert "2001-09-09 01:46:45" in lines[1]


def test_show_filters_by_kind_and_speaks_json(run: Path) -> None:
    result = foreshock("show", str(run), "--kind", "alarm", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [r["sequence"] for r in records] == [2, 4, 6]
    assert sorted(records[0]) == sorted(COLUMNS)


def test_verify_exits_0_when_whole_and_1_naming_the_first_bad_record(run: Path) -> None:
    good = foreshock("verify", "night")
    assert good.exit_code == 0
    assert "6 records" in good.stdout
    break_record(run, 3)
    bad = foreshock("verify", "night")
    assert bad.exit_code == 1
    assert "record 3" in bad.stdout
    verdict = json.loads(foreshock("verify", "night", "--json").stdout)
    assert (verdict["ok"], verdict["first_bad"], verdict["records"]) == (False, 3, 2)


def test_verify_of_a_corrupt_database_is_broken_and_show_a_readable_error(run: Path) -> None:
    (run / "run.db").write_bytes(b"garbage" * 1000)
    assert foreshock("verify", "night").exit_code == 1
    shown = foreshock("show", "night")
    assert shown.exit_code == 2
    assert "not a database" in shown.stderr


def test_a_damaged_record_is_shown_and_exported_as_found(run: Path, tmp_path: Path) -> None:
    break_record(run, 3)
    assert "'noon'" in foreshock("show", "night").stdout
    out = tmp_path / "out.jsonl"
    assert foreshock("export", "night", "--out", str(out)).exit_code == 0
    assert json.loads(out.read_text().splitlines()[2])["time"] == "noon"
    for format in ("csv", "parquet"):
        result = foreshock("export", "night", "--out", str(out), "--format", format)
        assert result.exit_code == 2
        assert "jsonl" in result.stderr


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_export_writes_every_record(run: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / f"audit.{format}"
    assert foreshock("export", "night", "--out", str(out), "--format", format).exit_code == 0
    if format == "jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    elif format == "csv":
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = pq.read_table(out).to_pylist()
    assert [int(r["sequence"]) for r in rows] == [1, 2, 3, 4, 5, 6]
    assert list(rows[0]) == COLUMNS or sorted(rows[0]) == sorted(COLUMNS)
    payload = rows[5]["payload"]
    assert (payload if format == "jsonl" else json.loads(payload)) == {"signal": "h1[L3]", "n": 5}
    with RunStore.open_readonly(run) as store:
        assert [r["hash"] for r in rows] == [record.hash for record in store.audit()]


def test_an_unwritable_export_and_an_unknown_run_are_readable_errors(run: Path) -> None:
    result = foreshock("export", "night", "--out", "no/such/dir/x.jsonl")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    result = foreshock("show", "day")
    assert result.exit_code == 2
    assert "no run 'day'" in result.stderr
    assert "night" in result.stderr
