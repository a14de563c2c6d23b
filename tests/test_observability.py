"""What a person or a monitoring system sees of a hub from outside: metrics and log lines."""

from __future__ import annotations

import json
import logging
from collections import defaultdict

import pytest
from conftest import Stream

from foreshock.pipeline import logs
from foreshock.pipeline.hub import Hub


@pytest.fixture
def recorded(monkeypatch):
    """Ray's metric classes, replaced by ones that remember."""
    import ray.util.metrics as room

    values = defaultdict(float)

    class Metric:
        def __init__(self, name, description="", tag_keys=(), **_):
            assert description.endswith(".")
            self.name, self.keys, self.tags = name, tag_keys, {}

        def set_default_tags(self, tags):
            self.tags = tags

        def _at(self, tags):
            labels = {**self.tags, **(tags or {})}
            assert set(labels) == set(self.keys)
            return (self.name, *(v for k, v in labels.items() if k != "run"))

        def inc(self, by=1.0, tags=None):
            values[self._at(tags)] += by

        def set(self, value, tags=None):
            values[self._at(tags)] = value

        def observe(self, value, tags=None):
            values[self._at(tags)] += 1

    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(room, name, Metric)
    return values


def test_the_hub_is_told_in_numbers(recorded):
    from foreshock.pipeline.cluster.metrics import Metrics

    metrics, hub = Metrics("r"), Hub("r")
    out = Stream(onset=200, steps=240, ranks=(0, 1)).events(hub)
    for command in (e.command for _, effects in out for e in effects if type(e).__name__ == "Issue"):
        metrics.issued(command)
    hub.assembler.dropped = 3
    metrics.turn(hub, 20, 0.01)
    hub.assembler.dropped = 5
    metrics.turn(hub, 10, 0.01)
    metrics.voted(0.25)
    assert recorded[("foreshock_frames_total",)] == 30
    assert recorded[("foreshock_frames_dropped_total",)] == 5
    assert recorded[("foreshock_commands_total",)] == 1
    assert recorded[("foreshock_step",)] == 239
    assert recorded[("foreshock_lag_steps",)] == 0
    assert recorded[("foreshock_incidents", "verifying")] == 1
    assert recorded[("foreshock_turn_seconds",)] == 2
    assert recorded[("foreshock_vote_seconds",)] == 0.25


def test_an_incident_that_leaves_a_state_is_no_longer_counted_there(recorded):
    from foreshock.pipeline.cluster.metrics import Metrics

    metrics, hub = Metrics("r"), Hub("r")
    for event, _ in Stream(onset=200).events(Hub("r")):
        hub.handle(event)
        metrics.turn(hub, 0, 0.0)
    assert recorded[("foreshock_incidents", "verifying")] == 0
    assert recorded[("foreshock_incidents", "recovered")] == 1


def test_json_log_lines_carry_run_attempt_rank_and_step(monkeypatch, capsys):
    logger = logging.getLogger("foreshock")
    before, propagate, level = list(logger.handlers), logger.propagate, logger.level
    monkeypatch.setattr(logs, "context", {"run": "r", "attempt": 2, "rank": 1, "step": 7})
    monkeypatch.setenv("FORESHOCK_LOG", "json")
    try:
        logs.configure()
        logs.configure()
        logger.warning("a %s", "word")
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.handlers[:], logger.propagate = before, propagate
        logger.setLevel(level)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["a word", "it failed"]
    assert {k: lines[0][k] for k in ("run", "attempt", "rank", "step", "level")} == {
        "run": "r", "attempt": 2, "rank": 1, "step": 7, "level": "warning",
    }  # fmt: skip
    assert "ValueError: why" in lines[1]["traceback"]


def test_without_being_asked_nobody_s_logging_is_touched(monkeypatch):
    monkeypatch.delenv("FORESHOCK_LOG", raising=False)
    before = list(logging.getLogger("foreshock").handlers)
    logs.configure()
    assert logging.getLogger("foreshock").handlers == before
