"""What docs/measured.md says of the stream's cost is what was committed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import stream as bench  # noqa: E402


@pytest.mark.parametrize("part", sorted(json.loads(bench.FILE.read_text())))
def test_the_docs_show_the_committed_table(part):
    text = (ROOT / "docs" / "measured.md").read_text()
    shown = text.split(f"<!-- stream {part} -->\n")[1].split(f"\n<!-- /stream {part} -->")[0]
    rows = json.loads(bench.FILE.read_text())[part]["rows"]
    assert shown == bench.TABLES[part](rows)
