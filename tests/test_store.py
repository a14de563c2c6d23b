"""The run store loses nothing, keeps nothing half, and says in words why it cannot."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from foreshock.pipeline.store import RunStore, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore(tmp_path / "run") as opened:
        yield opened


def one_event(store: RunStore, kinds: tuple[str, ...] = ("alarm",), body: bytes = b"") -> int:
    with store.transaction():
        event = store.append_event("frames", {"kinds": len(kinds)}, body)
        for kind in kinds:
            store.append_audit(event, 5.0, kind, {"event": event})
    return event


def python(code: str, *args: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


def test_events_come_back_as_they_went_in(store: RunStore) -> None:
    bodies = [bytes([n % 256]) * n for n in range(600)]
    with store.transaction():
        for n, body in enumerate(bodies):
            assert (
                store.append_event("frames", {"n": n, "loss": float("inf"), "nested": [None, "é"]}, body)
                == n + 1
            )
    read = list(store.events(after=100))
    assert [e[0] for e in read] == list(range(101, 601))
    assert [e[3] for e in read] == bodies[100:]
    assert read[0][1:3] == ("frames", {"n": 100, "loss": float("inf"), "nested": [None, "é"]})


def test_a_transaction_that_raises_leaves_nothing_and_the_chain_goes_on(store: RunStore) -> None:
    one_event(store)

    def fails() -> None:
        with store.transaction():
            event = store.append_event("frames", {})
            store.append_audit(event, 1.0, "decision", {})
            store.save_snapshot(event, b"state")
            store.set_meta("mode", "enforce")
            raise RuntimeError("hub")

    with pytest.raises(RuntimeError, match="hub"):
        fails()
    assert [e[0] for e in store.events()] == [1]
    assert store.latest_snapshot() is None
    assert store.get_meta("mode") is None
    one_event(store, ("alarm", "decision"))
    assert [(r.sequence, r.event, r.kind) for r in store.audit()] == [
        (1, 1, "alarm"),
        (2, 2, "alarm"),
        (3, 2, "decision"),
    ]
    assert store.verify().ok


def test_a_failure_swallowed_inside_a_transaction_still_rolls_it_back(store: RunStore) -> None:
    def swallows() -> None:
        with store.transaction():
            event = store.append_event("frames", {})
            with pytest.raises(TypeError):
                store.append_audit(event, 1.0, "decision", {"bad": object()})

    with pytest.raises(StoreError, match="rolled back"):
        swallows()
    assert list(store.events()) == []


def test_only_the_newest_event_is_audited_and_once(store: RunStore) -> None:
    first = one_event(store)
    with pytest.raises(ValueError, match="event 1"):
        store.append_audit(first, 1.0, "late", {})
    second = store.append_event("frames", {})
    with pytest.raises(ValueError, match="event 1"):
        store.append_audit(first, 1.0, "late", {})
    assert store.append_audit(second, 1.0, "alarm", {}).sequence == 2


def test_reopening_continues_chain_journal_and_anchor(tmp_path: Path) -> None:
    for _ in range(3):
        with RunStore(tmp_path) as store:
            one_event(store)
            one_event(store, ())
    with RunStore.open_readonly(tmp_path) as store:
        assert [r.event for r in store.audit()] == [1, 3, 5]
        assert [e[0] for e in store.events()] == list(range(1, 7))
        assert store.anchor().sequence == 3
        assert store.verify().ok


def test_the_newest_two_snapshots_are_kept_and_only_those_of_the_same_versions_are_read(
    store: RunStore,
) -> None:
    for number in (3, 5, 9, 9):
        store.save_snapshot(number, b"state %d" % number, "v1")
    with closing(sqlite3.connect(store.path / "run.db")) as database:
        assert database.execute("SELECT number FROM snapshot ORDER BY number").fetchall() == [(5,), (9,)]
    assert store.latest_snapshot("v1") == (9, b"state 9")
    assert store.latest_snapshot("v2") is None


def test_the_state_a_forked_run_started_from_is_kept_for_good(store: RunStore) -> None:
    assert store.first_snapshot() is None
    for number in (0, 3, 5, 9):
        store.save_snapshot(number, b"state %d" % number)
    assert store.first_snapshot() == b"state 0"
    assert store.latest_snapshot() == (9, b"state 9")


def test_an_inbox_item_is_taken_at_most_once(store: RunStore) -> None:
    with RunStore(store.path) as other:
        assert [other.push("approve", {"incident": n}) for n in range(3)] == [1, 2, 3]
    assert store.pending() == 3

    def takes_and_fails() -> None:
        with store.transaction():
            assert len(store.take()) == 3
            raise RuntimeError("hub")

    with pytest.raises(RuntimeError, match="hub"):
        takes_and_fails()
    with store.transaction():
        items = store.take(limit=1)
        items += store.take(limit=5)
    assert store.pending() == 0
    assert [(i.id, i.kind, i.payload) for i in items] == [
        (n + 1, "approve", {"incident": n}) for n in range(3)
    ]
    assert store.take() == []


def test_threads_pushing_and_taking_lose_and_double_nothing(store: RunStore) -> None:
    def push(who: int) -> None:
        for n in range(15):
            store.push("silence", {"who": who, "n": n})

    threads = [threading.Thread(target=push, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    taken = []
    while any(t.is_alive() for t in threads):
        taken += store.take()
    for thread in threads:
        thread.join()
    taken += store.take()
    assert sorted(i.id for i in taken) == list(range(1, 46))


def test_meta_holds_the_last_value(store: RunStore) -> None:
    assert store.get_meta("mode") is None
    store.set_meta("mode", "observe")
    store.set_meta("mode", "dry_run")
    assert store.get_meta("mode") == "dry_run"


def test_readers_follow_a_writing_process_and_always_find_it_whole(store: RunStore) -> None:
    writer = python(
        """
        import sys, time
        from pathlib import Path
        from foreshock.pipeline.store import RunStore
        store = RunStore(Path(sys.argv[1]))
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            with store.transaction():
                event = store.append_event("frames", {}, bytes(2000))
                store.append_audit(event, 1.0, "alarm", {})
                store.append_audit(event, 1.0, "decision", {})
        print(event)
        """,
        str(store.path),
    )
    lengths = []
    with RunStore.open_readonly(store.path) as reader:
        while writer.poll() is None:
            verdict = reader.verify()
            assert verdict.ok, verdict.reason
            assert verdict.records % 2 == 0
            lengths.append(verdict.records)
        events = int(finish(writer))
        assert reader.verify().records == 2 * events
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2


def test_reading_a_quiet_run_leaves_no_trace_and_writing_through_it_is_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        one_event(store)
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.iterdir()}
    with RunStore.open_readonly(tmp_path) as reader:
        assert reader.verify().ok
        assert len(list(reader.events())) == 1
        for write in (
            lambda: reader.append_event("frames", {}),
            lambda: reader.push("approve", {}),
            reader.take,
        ):
            with pytest.raises(StoreError, match="read-only"):
                write()
        assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.iterdir()} == before


KILLED = """
import os, random, signal, sys, time
from contextlib import closing
from pathlib import Path
from foreshock.pipeline.store import RunStore

path, choose = Path(sys.argv[1]), random.Random(7)

def write(started):
    store = RunStore(path)
    for n in range(10**9):
        with store.transaction():
            audits = n % 4
            event = store.append_event("frames", {"audits": audits}, os.urandom(3000))
            for _ in range(audits):
                store.append_audit(event, time.time(), "alarm", {"n": n})
            if n % 5 == 0:
                store.save_snapshot(event, bytes(20000))
        if n == 1:
            os.write(started, b".")

def check():
    with RunStore.open_readonly(path) as store:
        verdict, anchor = store.verify(), store.anchor()
        assert verdict.ok, verdict.reason
        audited = [record.event for record in store.audit()]
        assert len(audited) >= anchor.sequence
        assert len(set(audited[anchor.sequence:])) <= 1
        events = list(store.events())
        assert [e[0] for e in events] == list(range(1, len(events) + 1))
        for number, _, head, body in events:
            assert audited.count(number) == head["audits"] and len(body) == 3000
        point = store.latest_snapshot()
        assert point is None or point[0] <= len(events)
        return len(events), len(audited) - anchor.sequence

for _ in range(10):
    wait, started = os.pipe()
    child = os.fork()
    if not child:
        write(started)
    os.read(wait, 1)
    time.sleep(choose.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(*check())
"""


def test_a_writer_killed_at_random_moments_leaves_whole_commits_and_an_anchor_one_behind(
    tmp_path: Path,
) -> None:
    lines = [tuple(map(int, line.split())) for line in finish(python(KILLED, str(tmp_path))).splitlines()]
    counts = [events for events, _ in lines]
    assert len(counts) == 10
    assert counts == sorted(set(counts))
    with RunStore(tmp_path) as store:
        one_event(store)
        assert store.verify().ok
        assert store.anchor().sequence == len(list(store.audit()))


def test_a_crash_between_commit_and_anchor_is_valid_and_healed(store: RunStore) -> None:
    one_event(store)
    behind = (store.path / "audit.anchor").read_bytes()
    one_event(store, ("alarm", "decision"))
    store.close()
    (store.path / "audit.anchor").write_bytes(behind)
    with RunStore(store.path) as again:
        assert again.verify().ok
        one_event(again, ())
        assert again.anchor().sequence == 3
        assert again.verify().ok


def test_an_anchor_that_cannot_be_written_stops_the_next_commit_until_it_can(store: RunStore) -> None:
    one_event(store)
    obstacle = store.path / "audit.anchor.tmp"
    obstacle.mkdir()
    one_event(store)
    assert store.anchor().sequence == 1
    with pytest.raises(StoreError, match="anchor"):
        one_event(store)
    assert store.verify().ok
    obstacle.rmdir()
    one_event(store)
    assert (store.anchor().sequence, store.verify().ok) == (3, True)


def test_a_read_only_directory_is_a_store_error() -> None:
    code = """
        import os, sys
        from pathlib import Path
        from foreshock.pipeline.store import RunStore, StoreError
        import sqlalchemy.dialects.sqlite
        if os.getuid() == 0:
            os.setuid(65534)
        for path in (Path(sys.argv[1]), Path(sys.argv[1]) / "new"):
            try:
                RunStore(path)
            except StoreError as error:
                print(error)
        """
    # Not tmp_path: its parents are closed to the unprivileged user that this test must become.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        lines = finish(python(code, name)).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("cannot ") and name in line for line in lines)


def test_a_full_disk_is_a_store_error_and_loses_nothing_committed(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from foreshock.pipeline.store import RunStore, StoreError
        store = RunStore(Path(sys.argv[1]))
        done = 0
        try:
            while True:
                with store.transaction():
                    event = store.append_event("frames", {}, bytes(50_000))
                    store.append_audit(event, 1.0, "alarm", {})
                done += 1
        except StoreError as error:
            print(done, error)
        """

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done, words = finish(python(code, str(tmp_path), preexec_fn=limit)).split(" ", 1)
    assert int(done) > 3
    assert words.startswith("cannot write to the run store")
    with RunStore(tmp_path) as store:
        assert store.verify().records == int(done) == len(list(store.events()))
        one_event(store)


def test_a_locked_database_is_a_store_error(store: RunStore) -> None:
    with closing(sqlite3.connect(store.path / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with RunStore.open_readonly(store.path) as reader:
            assert reader.verify().ok
        impatient = store._engine.pool.connect()
        impatient.execute("PRAGMA busy_timeout = 10")
        impatient.close()
        with pytest.raises(StoreError, match="locked"):
            one_event(store)
        other.execute("ROLLBACK")
    one_event(store)


@pytest.mark.parametrize("readonly", [True, False])
def test_a_corrupt_missing_or_foreign_store_is_a_store_error(tmp_path: Path, readonly: bool) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        RunStore.open_readonly(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "run.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(StoreError, match="not a database"):
        RunStore(tmp_path, readonly=readonly)
    with RunStore(tmp_path / "other") as store:
        store.set_meta("schema", "99")
    with pytest.raises(StoreError, match="schema 99"):
        RunStore(tmp_path / "other", readonly=readonly)


def test_two_writers_of_one_run_never_interleave_silently(store: RunStore) -> None:
    one_event(store)
    with RunStore(store.path) as other:
        one_event(other)
        with pytest.raises(StoreError):
            one_event(store)
    assert store.verify().ok
