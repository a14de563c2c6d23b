"""Which run a command means: a directory, or a name under ./foreshock_runs. Shared by all commands."""

from __future__ import annotations

from pathlib import Path

import typer

RUNS = Path("foreshock_runs")
_MARKS = ("run.db", "audit.anchor")


def find_run(name_or_path: str | Path) -> Path:
    """The run's directory. Raises typer.BadParameter, which lists the runs that exist."""
    for candidate in (Path(name_or_path), RUNS / name_or_path):
        if _is_run(candidate):
            return candidate
    known = sorted(child.name for child in RUNS.iterdir() if _is_run(child)) if RUNS.is_dir() else []
    there = f"runs under ./{RUNS}: {', '.join(known)}" if known else f"there are no runs under ./{RUNS}"
    raise typer.BadParameter(f"no run '{name_or_path}'; {there}")


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)
