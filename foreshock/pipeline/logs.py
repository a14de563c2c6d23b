"""Log lines that a machine can read: FORESHOCK_LOG=json writes one JSON object a line, with run, attempt, rank and step."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

context: dict[str, Any] = {"run": None, "attempt": None, "rank": None, "step": None}
"""Of this process; each rank and the hub's actor keep theirs up to date."""


class JsonLines(logging.Formatter):
    """One object a record: time (seconds), level, logger, message, the context, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **context,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure() -> None:
    """Where FORESHOCK_LOG=json asks for it, once: Foreshock's own lines go to standard error as JSON, and nowhere else."""
    logger = logging.getLogger("foreshock")
    if os.environ.get("FORESHOCK_LOG", "").lower() != "json" or any(
        isinstance(h.formatter, JsonLines) for h in logger.handlers
    ):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
