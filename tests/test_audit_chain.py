"""The audit chain finds and names every tampering, in memory and in a real SQLite file."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.pipeline.store import RunStore, StoreError
from foreshock.remediation.audit import (
    GENESIS,
    Anchor,
    AuditRecord,
    canonical,
    parse,
    plain,
    seal,
    verify,
)


def chain(length: int, per_event: int = 1) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    for n in range(1, length + 1):
        previous = records[-1].hash if records else GENESIS
        event = (n - 1) // per_event + 1
        records.append(seal(n, event, 1000.0 + n / 3, "alarm", {"step": n, "statistic": n / 7}, previous))
    return records


def anchored(records: list[AuditRecord]) -> Anchor:
    return Anchor(records[-1].sequence, records[-1].hash) if records else Anchor()


def fields(record: AuditRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in AuditRecord.__slots__}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(st.characters(codec=None), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(json_values)
def test_plain_survives_canonical_text_and_is_idempotent(value: object) -> None:
    once = plain({"v": value})
    assert plain(once) == once
    assert parse(canonical(once).decode()) == once


def test_plain_turns_what_json_cannot_hold_into_words() -> None:
    value = {"a": np.float32(0.5), "b": np.arange(2), "c": -math.inf, "d": 2**53, "e": {2, 1}, "f": 1e300}
    expected = {"a": 0.5, "b": [0, 1], "c": "-inf", "d": "9007199254740992", "e": [1, 2], "f": 1e300}
    assert plain(value) == expected
    with pytest.raises(TypeError, match="object"):
        plain(object())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 8), st.integers(1, 3))
def test_an_untouched_chain_holds(length: int, per_event: int) -> None:
    records = chain(length, per_event)
    verdict = verify(records, anchored(records))
    assert (verdict.ok, verdict.records, verdict.first_bad) == (True, length, None)


edits = st.one_of(
    st.tuples(st.just("event"), st.integers(0, 99)),
    st.tuples(st.just("time"), st.floats(allow_nan=True)),
    st.tuples(st.just("kind"), st.text(max_size=5)),
    st.tuples(st.just("payload"), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
    st.tuples(st.just("previous"), st.text("0123456789abcdef", min_size=64, max_size=64)),
    st.tuples(st.just("hash"), st.text("0123456789abcdef", min_size=64, max_size=64)),
)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 8), st.data(), edits)
def test_any_edited_field_of_any_record_is_named(length: int, data: st.DataObject, edit: tuple) -> None:
    records = chain(length)
    at = data.draw(st.integers(0, length - 1))
    name, value = edit
    if getattr(records[at], name) == value:
        return
    touched = [*records[:at], replace(records[at], **{name: value}), *records[at + 1 :]]
    verdict = verify(touched, anchored(records))
    assert (verdict.ok, verdict.first_bad, verdict.records) == (False, at + 1, at)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 7).flatmap(lambda n: st.permutations(range(n))), st.booleans())
def test_any_permutation_is_found_at_its_first_displaced_record(order: list[int], renumber: bool) -> None:
    records = chain(len(order))
    mixed = [records[i] for i in order]
    if renumber:
        mixed = [replace(r, sequence=n) for n, r in enumerate(mixed, start=1)]
    displaced = [n for n, i in enumerate(order, start=1) if i != n - 1]
    verdict = verify(mixed, anchored(records))
    assert verdict.ok is (not displaced)
    assert verdict.first_bad == (displaced[0] if displaced else None)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.data())
def test_a_truncated_tail_is_named_only_with_the_anchor(length: int, data: st.DataObject) -> None:
    records = chain(length)
    kept = data.draw(st.integers(0, length - 1))
    assert verify(records[:kept]).ok
    verdict = verify(records[:kept], anchored(records))
    assert (verdict.ok, verdict.first_bad) == (False, kept + 1)


@pytest.mark.parametrize(("ahead", "ok"), [(0, True), (1, True), (2, True), (3, False), (4, False)])
def test_one_commit_beyond_the_anchor_is_a_crash_and_two_are_an_insertion(ahead: int, ok: bool) -> None:
    records = chain(8, per_event=2)
    verdict = verify(records[: 4 + ahead], anchored(records[:4]))
    assert (verdict.ok, verdict.first_bad) == (ok, None if ok else 7)


def test_a_record_beyond_the_anchor_that_claims_the_anchored_commit_is_an_insertion() -> None:
    records = chain(4)
    forged = seal(5, 4, 1.0, "alarm", {}, records[-1].hash)
    verdict = verify([*records, forged], anchored(records))
    assert (verdict.ok, verdict.first_bad) == (False, 5)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.data(), st.sampled_from(["payload", "previous"]))
def test_an_edited_record_whose_hash_was_made_to_fit_is_named(
    length: int, data: st.DataObject, name: str
) -> None:
    records = chain(length)
    at = data.draw(st.integers(0, length - 1))
    old = fields(records[at]) | ({"payload": {"step": -1}} if name == "payload" else {"previous": "f" * 64})
    forged = seal(**{key: value for key, value in old.items() if key != "hash"})
    verdict = verify([*records[:at], forged, *records[at + 1 :]], anchored(records))
    assert (verdict.ok, verdict.first_bad) == (False, at + 1)


def test_a_whole_chain_rewritten_behind_the_anchor_is_found() -> None:
    records = chain(5)
    forged = records[:2]
    for r in records[2:]:
        forged.append(seal(r.sequence, r.event, r.time, r.kind, {"step": 0}, forged[-1].hash))
    assert verify(forged).ok
    verdict = verify(forged, anchored(records))
    assert (verdict.ok, verdict.first_bad) == (False, 5)


# --- through a real SQLite file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Eight events, of which the first six are audited, two records each."""
    with RunStore(tmp_path) as store:
        for n in range(8):
            with store.transaction():
                event = store.append_event("frames", {"n": n}, b"x")
                for kind in ("alarm", "decision") if n < 6 else ():
                    store.append_audit(event, 1000.0 + n, kind, {"step": n, "loss": 0.1 * n})
        assert store.verify().ok
    return tmp_path


def edit(run: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run / "run.db")) as database, database:
        for statement in statements:
            database.execute(statement)


def rows(run: Path) -> list[AuditRecord]:
    with RunStore.open_readonly(run) as store:
        return list(store.audit())


def insert(run: Path, record: AuditRecord) -> None:
    values = fields(record) | {"payload": canonical(record.payload).decode()}
    with closing(sqlite3.connect(run / "run.db")) as database, database:
        database.execute(
            "INSERT INTO audit VALUES (?,?,?,?,?,?,?)", [values[n] for n in AuditRecord.__slots__]
        )


def shift(run: Path, start: int) -> None:
    edit(
        run,
        f"UPDATE audit SET sequence = -sequence - 1 WHERE sequence >= {start}",
        "UPDATE audit SET sequence = -sequence WHERE sequence < 0",
    )


def first_bad(run: Path) -> int | None:
    with RunStore.open_readonly(run) as store:
        verdict = store.verify()
    assert not verdict.ok
    assert str(verdict.first_bad) in verdict.reason
    # A broken log is not built upon: the evidence stays as it is.
    with RunStore(run) as store, pytest.raises(StoreError, match="broken"):
        store.append_event("frames", {})
    return verdict.first_bad


@pytest.mark.parametrize(
    "change",
    [
        "event = 9",
        "time = time + 1e-9 * 2000",
        "time = 'noon'",
        "kind = 'Alarm'",
        "kind = x'ff'",
        "kind = CAST(x'ff41' AS TEXT)",
        "payload = replace(payload, '}', ',\"x\":1}')",
        "payload = replace(payload, ':', ': ')",
        "payload = '[]'",
        "payload = '{'",
        "payload = x'00'",
        "previous = hash",
        "hash = previous",
    ],
)
def test_an_edited_field_is_named(run: Path, change: str) -> None:
    edit(run, f"UPDATE audit SET {change} WHERE sequence = 5")
    assert first_bad(run) == 5


def test_an_edited_last_row_with_its_hash_made_to_fit_is_named(run: Path) -> None:
    last = rows(run)[-1]
    edit(run, "DELETE FROM audit WHERE sequence = 12")
    insert(run, seal(12, last.event, last.time, last.kind, {"step": -1}, last.previous))
    assert first_bad(run) == 12


def test_a_deleted_row_is_named(run: Path) -> None:
    edit(run, "DELETE FROM audit WHERE sequence = 4")
    assert first_bad(run) == 4


def test_a_deleted_row_whose_followers_were_renumbered_is_named(run: Path) -> None:
    edit(
        run,
        "DELETE FROM audit WHERE sequence = 4",
        "UPDATE audit SET sequence = -sequence + 1 WHERE sequence > 4",
        "UPDATE audit SET sequence = -sequence WHERE sequence < 0",
    )
    assert first_bad(run) == 4


def test_swapped_rows_are_named(run: Path) -> None:
    edit(
        run,
        "UPDATE audit SET sequence = -1 WHERE sequence = 3",
        "UPDATE audit SET sequence = 3 WHERE sequence = 7",
        "UPDATE audit SET sequence = 7 WHERE sequence = -1",
    )
    assert first_bad(run) == 3


@pytest.mark.parametrize("kept", [0, 1, 11])
def test_a_truncated_tail_is_named(run: Path, kept: int) -> None:
    edit(run, f"DELETE FROM audit WHERE sequence > {kept}")
    assert first_bad(run) == kept + 1


@pytest.mark.parametrize("fitting", [True, False])
def test_a_row_inserted_in_the_middle_is_named(run: Path, fitting: bool) -> None:
    before = rows(run)[4]
    shift(run, 6)
    forged = seal(6, before.event, before.time, "alarm", {"step": 0}, before.hash)
    insert(run, forged if fitting else replace(forged, kind="decision"))
    assert first_bad(run) == 6


@pytest.mark.parametrize("event", [5, 6, 7, 9])
def test_a_correctly_chained_row_inserted_at_the_tail_is_named(run: Path, event: int) -> None:
    last = rows(run)[-1]
    insert(run, seal(13, event, last.time + 1, "decision", {"step": 9}, last.hash))
    assert first_bad(run) == 13


def test_a_missing_or_unreadable_anchor_is_not_trusted(run: Path) -> None:
    (run / "audit.anchor").write_text("{")
    with RunStore.open_readonly(run) as store:
        assert not store.verify().ok
    (run / "audit.anchor").unlink()
    assert first_bad(run) == 1


def test_the_pure_core_loads_neither_torch_nor_a_database() -> None:
    heavy = "{'torch', 'sqlalchemy', 'sqlite3', 'pyarrow', 'rfc8785'}"
    code = f"import sys, foreshock.remediation.audit; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_hash_is_sha256_of_the_canonical_fields() -> None:
    import hashlib

    record = seal(1, 4, 2.0, "alarm", {"b": 1.0, "a": "é"}, GENESIS)
    text = (
        '{"event":4,"kind":"alarm","payload":{"a":"é","b":1},'
        f'"previous":"{GENESIS}","sequence":1,"time":2}}'
    )
    assert record.hash == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(text)["payload"] == record.payload
