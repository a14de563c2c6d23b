"""The committed random schedules hold what the docs say of them, and one is played again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import schedules  # noqa: E402


def test_no_schedule_broke_the_promise_and_the_docs_show_it():
    facts = json.loads(schedules.FILE.read_text())
    assert facts["seeds"] == [0, 499]
    assert sum(facts["violations"].values()) == 0
    assert (
        min(facts["counts"][name] for name in ("commands applied", "ranks killed", "commands refused")) > 100
    )
    text = (ROOT / "docs" / "measured.md").read_text()
    shown = text.split("<!-- schedules -->\n")[1].split("\n<!-- /schedules -->")[0]
    assert shown == schedules.table(facts)


@pytest.mark.slow
def test_one_schedule_again():
    command = [sys.executable, str(ROOT / "benchmarks" / "schedules.py"), "--one", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
