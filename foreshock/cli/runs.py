"""`foreshock runs`, `status` and `replay`: which runs there are, how one is doing, and whether it can be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foreshock.cli.reach import reach, read_status
from foreshock.cli.runs_dir import RUNS, find_run

Run = Annotated[str, typer.Argument(help="A run directory, or a name under ./foreshock_runs.", metavar="RUN")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value on one line.")]


def status(run: Run, as_json: Json = False) -> None:
    """How a run is doing: what is watched, what is not and why, which mode acts, what was done."""
    facts = read_status(reach(run))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)

    def say(text: object, style: str = "") -> None:
        console.print(escape(str(text)), style=style)

    say(f"{facts['run']}  {facts['state']}, step {facts.get('step')}, attempt {facts.get('attempt')}")
    if facts.get("failure"):
        say(f"NOT WATCHING: {facts['failure']}", "bold red")
    mode = facts.get("mode") or {}
    if mode:
        say(
            f"mode      {mode['acting']} (code {mode['code']}, person {mode['person']}, policy {mode['policy']}; the lowest wins)"
        )
    for name, setting in facts.get("settings", {}).items():
        say(f"{name:9} {setting['value']} ({setting['source']})")
    watched = facts.get("watched", {})
    say("watched   " + (", ".join(f"{name} ({n} signals)" for name, n in watched.items()) or "nothing"))
    held = facts.get("budget_held")
    say(
        "budget    none can be stated yet"
        if held is None
        else f"budget    at most {held:.3g} false alarms in 1,000 samples of a signal (provisional)"
    )
    for limit in facts.get("limits", []):
        say(f"not watched  {limit}", "yellow")
    for name, reason in facts.get("unavailable", {}).items():
        say(f"unavailable  {name}: {reason}", "yellow")
    for intervention in facts.get("standing", []):
        say(f"standing  {json.dumps(intervention)}")
    spent = facts.get("spent") or {}
    say(
        f"spent     {spent.get('actions', 0)} actions, {spent.get('rollbacks', 0)} rollbacks; {len(facts.get('incidents', []))} incidents"
    )
    for item in facts.get("incidents", []):
        say(f"          {item['id']} {item['policy']}: {item['state']} {item['reason']}")


def list_runs(
    directory: Annotated[Path, typer.Argument(help="Where runs lie.", metavar="DIR")] = RUNS,
    as_json: Json = False,
) -> None:
    """The runs in a directory, newest last."""
    found = sorted(directory.glob("*/run.db"), key=lambda p: p.stat().st_mtime) if directory.is_dir() else []
    rows = []
    for path in found:
        try:
            rows.append({"directory": str(path.parent), **read_status(path.parent)})
        except typer.Exit:  # one damaged run does not hide the others
            rows.append({"directory": str(path.parent), "run": path.parent.name, "state": "damaged"})
    if as_json:
        typer.echo(
            json.dumps(
                [
                    {k: r.get(k) for k in ("directory", "run", "state", "step", "attempt", "failure")}
                    for r in rows
                ]
            )
        )
        return
    if not rows:
        typer.echo(
            f"no runs under {directory}; foreshock.watch(...) writes there, foreshock demo attention makes one"
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "state", "step", "mode", "incidents", "not watched")
    for row in rows:
        mode = (row.get("mode") or {}).get("acting", "")
        table.add_row(
            row["directory"],
            row["state"],
            str(row.get("step", "")),
            mode,
            str(len(row.get("incidents", []))),
            row.get("failure") or "",
        )
    Console().print(table)


def replay(run: Run, as_json: Json = False) -> None:
    """Fold the run's journal again and compare with its audit log, bit for bit. Exit 1 where they differ."""
    from foreshock.pipeline.replay import replay as fold_again
    from foreshock.pipeline.store import RunStore, StoreError

    try:
        with RunStore.open_readonly(find_run(run)) as store:
            result = fold_again(store)
    except (StoreError, ValueError) as error:
        typer.echo(f"{run}: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(
            json.dumps({"events": result.events, "records": result.records, "difference": result.difference})
        )
    elif result.difference is None:
        typer.echo(f"{result.events} events give the same {result.records} records")
    else:
        typer.echo(f"DIFFERS after {result.events} events: {result.difference}", err=True)
    if result.difference is not None:
        raise typer.Exit(1)
