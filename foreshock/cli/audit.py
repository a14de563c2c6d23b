"""`foreshock audit`: the record of a run, read from outside it. Never writes to the run."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreshock.cli.runs_dir import find_run

if TYPE_CHECKING:
    from foreshock.pipeline.store import RunStore
    from foreshock.remediation.audit import AuditRecord

app = typer.Typer(help="Show, verify and export the hash-chained record of a run.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="A run directory, or a run's name under ./foreshock_runs.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


class Format(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


@app.command()
def show(
    run: Run,
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest records.")] = 50,
    kind: Annotated[str | None, typer.Option(help="Only records of this kind.")] = None,
    as_json: Json = False,
) -> None:
    """Print the newest records, newest last."""
    with _opened(run) as store:
        newest = deque((r for r in store.audit() if kind in (None, r.kind)), maxlen=limit)
    if as_json:
        typer.echo("".join(_json(asdict(record)) + "\n" for record in newest), nl=False)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("#", "time (UTC)", "kind", "payload", "hash")
    for r in newest:
        cells = (r.sequence, _when(r), r.kind, _json(r.payload), str(r.hash)[:12])
        table.add_row(*(Text(str(cell)) for cell in cells))  # Text: "h1[L3]" is not console markup
    Console().print(table)


@app.command()
def verify(run: Run, as_json: Json = False) -> None:
    """Check the chain and its anchor: exit 0 if whole, 1 if not, naming the first bad record."""
    from foreshock.pipeline.store import RunStore, StoreError
    from foreshock.remediation.audit import Verdict

    path = find_run(run)
    try:
        with RunStore.open_readonly(path) as store:
            verdict = store.verify()
    except StoreError as error:
        verdict = Verdict(False, 0, None, str(error))
    state = "ok" if verdict.ok else "BROKEN"
    typer.echo(_json(asdict(verdict)) if as_json else f"{state}: {verdict.reason}")
    raise typer.Exit(0 if verdict.ok else 1)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    format: Annotated[Format, typer.Option(help="Payloads are JSON text in csv and parquet.")] = Format.JSONL,
) -> None:
    """Write the whole record to a file."""
    with _opened(run) as store:
        rows = [asdict(record) for record in store.audit()]
    try:
        if format is Format.JSONL:
            out.write_text("".join(_json(row) + "\n" for row in rows), encoding="utf-8")
        else:
            _write_flat([row | {"payload": _json(row["payload"])} for row in rows], out, format)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error}") from error
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(f"a damaged record has no place in columns, use jsonl: {error}") from error
    typer.echo(f"{len(rows)} records written to {out}")


def _write_flat(rows: list[dict[str, Any]], out: Path, format: Format) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    types = {"sequence": pa.int64(), "event": pa.int64(), "time": pa.float64()}
    types |= dict.fromkeys(("kind", "payload", "previous", "hash"), pa.string())
    table = pa.Table.from_pylist(rows, pa.schema(types))
    (pa.csv.write_csv if format is Format.CSV else pa.parquet.write_table)(table, str(out))


def _when(record: AuditRecord) -> str:
    try:
        return datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return repr(record.time)  # shown as found: `verify` is what judges it


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


@contextmanager
def _opened(run: str) -> Iterator[RunStore]:
    from foreshock.pipeline.store import RunStore, StoreError

    path = find_run(run)
    try:
        with RunStore.open_readonly(path) as store:
            yield store
    except StoreError as error:
        raise typer.BadParameter(str(error)) from error
