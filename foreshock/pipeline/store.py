"""The run store: the journal that is folded, the audit chain that is kept, the inbox that people write to.

Beside the road, under the hub's shell: an event is journalled, handled and audited in one transaction, so
what was decided and what was recorded never part. One decider writes; any process may read, or `push`.
SQLite (WAL, synchronous=FULL) in the run directory by default, any SQLAlchemy URL otherwise.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from foreshock.remediation.audit import GENESIS, Anchor, AuditRecord, Verdict, canonical, parse, seal, verify
from foreshock.remediation.durable import sync

DATABASE, ANCHOR, SCHEMA = "run.db", "audit.anchor", "2"
_PAGE = 256  # rows a read: no reader holds a snapshot so long that the WAL cannot be recycled

_tables = sa.MetaData()
_big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _table(name: str, key: str, key_type: Any = _big, **columns: Any) -> sa.Table:
    rest = (sa.Column(column, kind, nullable=False) for column, kind in columns.items())
    return sa.Table(name, _tables, sa.Column(key, key_type, primary_key=True), *rest)


_journal = _table("journal", "number", kind=sa.Text, head=sa.Text, body=sa.LargeBinary)
_text = dict.fromkeys(("kind", "payload", "previous", "hash"), sa.Text)
_audit = _table("audit", "sequence", event=_big, time=sa.Double, **_text)
_snapshot = _table("snapshot", "number", body=sa.LargeBinary, versions=sa.Text)
_inbox = _table("inbox", "id", time=sa.Double, kind=sa.Text, payload=sa.Text, taken=sa.Boolean)
_meta = _table("meta", "key", sa.Text, value=sa.Text)
_delivery = _table("delivery", "source", sa.Text, number=_big)


class StoreError(Exception):
    """The record cannot be read or written: disk full, read-only, locked, corrupt or tampered with."""


@dataclass(frozen=True, slots=True)
class InboxItem:
    """What a person or another process asks of the run. `time`: when it was pushed, in seconds."""

    id: int
    time: float
    kind: str
    payload: dict[str, Any]


@dataclass(slots=True)
class _Tail:
    """Where the next rows go: journal number, audit chain head, and whether this commit audits."""

    number: int
    sequence: int
    hash: str
    event: int
    fresh: bool = False


class RunStore:
    """Everything durable of one run, in the directory `path`.

    Methods that write join the surrounding `transaction()` or make their own; methods that read see what is
    committed. Every failure of disk or database is a `StoreError`, and then nothing was written.
    """

    def __init__(self, path: Path, url: str | None = None, *, readonly: bool = False) -> None:
        self.path, self._readonly = Path(path), readonly
        self._lock = threading.RLock()
        self._connection: sa.Connection | None = None
        self._tail: _Tail | None = None
        self._failed = self._checked = False
        with _readable(f"open the run store in {path}", SQLAlchemyError, OSError):
            self._engine = self._make_engine(url)
        if not readonly:
            with self._writing() as connection:
                _tables.create_all(connection)
                if connection.execute(sa.select(_meta)).first() is None:
                    connection.execute(_meta.insert(), {"key": "schema", "value": SCHEMA})
        if (schema := self.get_meta("schema")) != SCHEMA:
            self.close()
            raise StoreError(f"the run store in {path} has schema {schema}; this Foreshock reads {SCHEMA}")

    @classmethod
    def open_readonly(cls, path: Path, url: str | None = None) -> RunStore:
        """For those who look: never writes, and works while another process does."""
        return cls(path, url, readonly=True)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """What is written inside is committed together or not at all; inner ones join the outermost.

        The anchor follows the commit. If it cannot be written the commit stands, and none follows until it
        could be: the database is never more than one commit ahead.
        """
        with self._lock:
            if self._connection is not None:
                try:
                    yield self._connection
                except BaseException:
                    self._failed = True
                    raise
                return
            try:
                with self._writing() as self._connection:
                    tail = self._tail = self._tail or self._resume(self._connection)
                    tail.fresh = self._failed = False
                    yield self._connection
                    if self._failed:
                        raise StoreError("a write in this transaction failed, so all of it is rolled back")
                if tail.fresh:
                    try:
                        self._write_anchor(Anchor(tail.sequence, tail.hash))
                    except StoreError:
                        self._tail = None
            except BaseException:
                self._tail = None  # read anew before the next write: memory never runs ahead of the disk
                raise
            finally:
                self._connection = None

    def append_event(self, kind: str, head: Mapping[str, Any], body: bytes = b"") -> int:
        """Journals one event; its number, from 1 without gaps. The journal is never truncated."""
        with self.transaction() as connection:
            number = self._open_tail.number + 1
            row = {"number": number, "kind": kind, "head": json.dumps(head), "body": body}
            connection.execute(_journal.insert(), row)
            self._open_tail.number = number
        return number

    def append_audit(self, event: int, time: float, kind: str, payload: Mapping[str, Any]) -> AuditRecord:
        """Seals `payload` onto the chain, as caused by journal event `event`.

        Raises ValueError unless `event` is the newest in the journal and the only one audited in its commit:
        by that `verify` tells a crash from an inserted record.
        """
        with self.transaction() as connection:
            tail = self._open_tail
            if event != tail.number or tail.fresh != (tail.event == event):
                raise ValueError(
                    f"event {event} cannot be audited in this commit; event {tail.number} is newest"
                )
            record = seal(tail.sequence + 1, event, time, kind, payload, tail.hash)
            row = {name: getattr(record, name) for name in AuditRecord.__slots__}
            connection.execute(_audit.insert(), row | {"payload": canonical(record.payload).decode()})
            tail.sequence, tail.hash, tail.event, tail.fresh = record.sequence, record.hash, event, True
        return record

    def save_snapshot(self, number: int, body: bytes, versions: str = "") -> None:
        """Keeps the hub's state after event `number`, readable by `versions`.

        The newest two are kept, and number 0: the state that a forked run started from.
        """
        key = _snapshot.c.number
        with self.transaction() as connection:
            connection.execute(_snapshot.delete().where(key == number))
            connection.execute(_snapshot.insert(), {"number": number, "body": body, "versions": versions})
            kept = connection.scalars(sa.select(key).order_by(key.desc()).limit(2)).all()
            connection.execute(_snapshot.delete().where(key > 0, key < kept[-1]))

    def latest_snapshot(self, versions: str = "") -> tuple[int, bytes] | None:
        """The newest (number, body) of the same `versions`, or None."""
        query = sa.select(_snapshot).where(_snapshot.c.versions == versions)
        rows = self._rows(query.order_by(_snapshot.c.number.desc()).limit(1))
        return (rows[0].number, rows[0].body) if rows else None

    def first_snapshot(self) -> bytes | None:
        """The state that the run started from, number 0, where it did not start from nothing."""
        rows = self._rows(sa.select(_snapshot.c.body).where(_snapshot.c.number == 0))
        return rows[0].body if rows else None

    def events(self, after: int = 0) -> Iterator[tuple[int, str, dict[str, Any], bytes]]:
        """(number, kind, head, body) of every event after number `after`, in order."""
        for row in self._pages(_journal.c.number, after):
            yield row.number, row.kind, json.loads(row.head), row.body

    def audit(self, upto: int = 2**53) -> Iterator[AuditRecord]:
        """The chain in order. A damaged row comes as a record that cannot match its hash."""
        for row in self._pages(_audit.c.sequence, upto=upto):
            try:
                payload = parse(row.payload)
            except (ValueError, TypeError, RecursionError):
                payload = {"damaged": repr(row.payload)}
            yield AuditRecord(**{**row._mapping, "payload": payload})

    def verify(self) -> Verdict:
        """Whether the chain and its anchor are as written; right also while the run goes on."""
        ends = [
            sa.select(sa.func.max(key)).scalar_subquery() for key in (_audit.c.sequence, _journal.c.number)
        ]
        for _ in range(1000):
            try:
                anchor = self.anchor()
            except (OSError, ValueError, KeyError, TypeError) as error:
                return Verdict(False, 0, None, f"{ANCHOR} cannot be read: {error!r}")
            sequence, number = tuple(self._rows(sa.select(*ends))[0])
            # Commits wait for the anchor: as it stood still around the read, it is at most one behind.
            if self.anchor() == anchor:
                return verify(self.audit(upto=sequence or 0), anchor, number or 0)
        raise StoreError("the run writes too fast to be verified; try again")

    def anchor(self) -> Anchor:
        """The anchor beside the database; where there is none, that of an empty chain."""
        file = self.path / ANCHOR
        return Anchor(**json.loads(file.read_text())) if file.exists() else Anchor()

    def push(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Leaves a request for the decider, from any process; its id."""
        row = {"time": time.time(), "kind": kind, "payload": json.dumps(payload), "taken": False}
        with self._writing() as connection:
            return int(connection.scalars(_inbox.insert().returning(_inbox.c.id), row).one())

    def pending(self) -> int:
        """How many requests wait to be taken."""
        query = sa.select(sa.func.count()).select_from(_inbox).where(_inbox.c.taken.is_(False))
        return int(self._rows(query)[0][0])

    def take(self, limit: int = 1000) -> list[InboxItem]:
        """The oldest requests not taken yet; each is handed out once, if the transaction commits."""
        key, waiting = _inbox.c.id, _inbox.c.taken.is_(False)
        oldest = sa.select(key).where(waiting).order_by(key).limit(limit)
        claim = _inbox.update().where(key.in_(oldest), waiting).values(taken=True).returning(_inbox)
        with self.transaction() as connection:
            rows = connection.execute(claim).all()
        return [InboxItem(r.id, r.time, r.kind, json.loads(r.payload)) for r in sorted(rows)]

    def get_meta(self, key: str) -> str | None:
        """The value last set for `key`, or None."""
        rows = self._rows(sa.select(_meta.c.value).where(_meta.c.key == key))
        return rows[0].value if rows else None

    def set_meta(self, key: str, value: str) -> None:
        with self.transaction() as connection:
            connection.execute(_meta.delete().where(_meta.c.key == key))
            connection.execute(_meta.insert(), {"key": key, "value": value})

    def deliveries(self) -> dict[str, int]:
        """How far each source's numbered events are in the journal."""
        return {row.source: row.number for row in self._rows(sa.select(_delivery))}

    def set_deliveries(self, numbers: Mapping[str, int]) -> None:
        """Notes, with the events themselves, how far each of these sources is."""
        rows = [{"source": source, "number": number} for source, number in numbers.items()]
        with self.transaction() as connection:
            for at in range(0, len(rows), _PAGE):
                part = rows[at : at + _PAGE]
                connection.execute(
                    _delivery.delete().where(_delivery.c.source.in_([r["source"] for r in part]))
                )
                connection.execute(_delivery.insert(), part)

    def forget_deliveries(self) -> None:
        """An attempt began: what was numbered before it is not delivered any more."""
        with self.transaction() as connection:
            connection.execute(_delivery.delete())

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open_tail(self) -> _Tail:
        assert self._tail is not None, "only inside a transaction"
        return self._tail

    def _resume(self, connection: sa.Connection) -> _Tail:
        """Where the last commit ended, with the anchor brought up to it; at first, after checking it all."""
        if not self._checked and not (verdict := self.verify()).ok:
            raise StoreError(f"the audit log in {self.path} is broken, nothing is added: {verdict.reason}")
        self._checked = True
        number = connection.scalar(sa.select(sa.func.max(_journal.c.number))) or 0
        last = connection.execute(sa.select(_audit).order_by(_audit.c.sequence.desc()).limit(1)).first()
        if last is None:
            return _Tail(number, 0, GENESIS, 0)
        self._write_anchor(Anchor(last.sequence, last.hash))
        return _Tail(number, last.sequence, last.hash, last.event)

    def _write_anchor(self, anchor: Anchor) -> None:
        """Replaces the anchor file whole, and durably: file first, then its directory's entry."""
        file, draft = self.path / ANCHOR, self.path / f"{ANCHOR}.tmp"
        with _readable(f"write {file}", OSError):
            draft.write_text(json.dumps({"sequence": anchor.sequence, "hash": anchor.hash}))
            sync(draft)
            draft.replace(file)
            sync(self.path)

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        if self._readonly:
            raise StoreError(f"the run store in {self.path} was opened read-only")
        with (
            _readable(f"write to the run store in {self.path}", SQLAlchemyError),
            self._engine.connect().execution_options(immediate=True) as connection,
            connection.begin(),
        ):
            yield connection

    def _rows(self, query: sa.Select[Any]) -> list[sa.Row[Any]]:
        with (
            _readable(f"read the run store in {self.path}", SQLAlchemyError),
            self._engine.connect() as connection,
        ):
            return list(connection.execute(query).all())

    def _pages(self, key: sa.Column[Any], after: int = 0, upto: int = 2**53) -> Iterator[sa.Row[Any]]:
        query = sa.select(key.table).where(key <= upto).order_by(key).limit(_PAGE)
        while rows := self._rows(query.where(key > after)):
            yield from rows
            after = rows[-1]._mapping[key]

    def _make_engine(self, url: str | None) -> sa.Engine:
        if url is not None:
            engine = sa.create_engine(url)
        elif self._readonly:
            # A new connection for each read, so that it sees whether a writer has come or gone.
            engine = sa.create_engine("sqlite://", creator=self._look, poolclass=sa.NullPool)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            where = sa.URL.create("sqlite", database=str(self.path / DATABASE))
            engine = sa.create_engine(where, connect_args={"timeout": 10})
        if engine.dialect.name == "sqlite":
            # pysqlite begins transactions unasked; SQLAlchemy's documented cure is to begin them here.
            sa.event.listen(engine, "connect", self._prepare)
            sa.event.listen(engine, "begin", _begin)
        return engine

    def _look(self) -> sqlite3.Connection:
        """No -wal file means no writer is there, and `immutable` keeps us from making one."""
        file = (self.path / DATABASE).absolute()
        quiet = "" if file.with_name(f"{DATABASE}-wal").exists() else "&immutable=1"
        return sqlite3.connect(f"{file.as_uri()}?mode=ro{quiet}", uri=True, timeout=10)

    def _prepare(self, connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None
        # A flipped bit must reach `verify` as an altered record, not as a decoding error without a place.
        connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        if not self._readonly:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")


def _begin(connection: sa.Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def _readable(doing: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise StoreError(f"cannot {doing}: {getattr(error, 'orig', None) or error}") from error
