"""`foreshock incident`: list and show incidents; approve or reject what waits for a person."""

from __future__ import annotations

import getpass
import json
from typing import Annotated, Any

import typer

from foreshock.cli.reach import push, reach, read_status
from foreshock.cli.runs import Json, Run

app = typer.Typer(no_args_is_help=True)
Id = Annotated[str, typer.Argument(help="The incident, as `incident list` names it.", metavar="ID")]
Who = Annotated[str | None, typer.Option("--by", help="Who answers; your login name by default.")]


@app.command(name="list")
def list_incidents(run: Run, as_json: Json = False) -> None:
    """The incidents of a run, oldest first."""
    incidents = read_status(reach(run)).get("incidents", [])
    if as_json:
        typer.echo(json.dumps(incidents))
        return
    if not incidents:
        typer.echo("no incidents")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "policy", "mechanism", "layers", "onset", "state", "tried")
    for item in incidents:
        d = item["diagnosis"]
        tried = "; ".join(f"{', '.join(t['actions'])}: {t['result']}" for t in item["tried"])
        layers = ", ".join(map(str, d["layers"]))
        table.add_row(
            item["id"],
            item["policy"],
            d["mechanism"],
            layers,
            f"{d['onset'][0]}-{d['onset'][1]}",
            item["state"],
            tried,
        )
    Console().print(table)


@app.command()
def show(run: Run, incident: Id, as_json: Json = False) -> None:
    """Everything known of one incident: the diagnosis with its alarms, what was ruled out, what was tried."""
    item = _find(run, incident)
    if as_json:
        typer.echo(json.dumps(item))
        return
    d = item["diagnosis"]
    typer.echo(f"{item['id']}  {item['policy']}  {item['state']}  {item['reason']}")
    typer.echo(
        f"{d['mechanism']} ({d['confidence']}, {d['severity']}), layers {d['layers']}, onset {d['onset'][0]} to {d['onset'][1]}"
    )
    for alarm in d["alarms"]:
        typer.echo(
            f"  alarm {alarm['signal']} at step {alarm['step']}: {alarm['statistic']:.1f} over {alarm['threshold']:.1f}"
        )
    for name, reason in d["ruled_out"]:
        typer.echo(f"  not {name}: {reason}")
    for tried in item["tried"]:
        typer.echo(
            f"  rung {tried['rung'] + 1} {', '.join(tried['actions'])}: {tried['result']} {tried['reason']}"
        )
    if item["decision"] and item["state"] == "awaiting":
        typer.echo(f"  waits for: foreshock incident approve {run} {item['id']}")


@app.command()
def approve(run: Run, incident: Id, by: Who = None) -> None:
    """Let the waiting rung act."""
    _answer(run, incident, "approve", by)


@app.command()
def reject(run: Run, incident: Id, by: Who = None) -> None:
    """Refuse the waiting rung; the incident ends."""
    _answer(run, incident, "reject", by)


def _answer(run: str, incident: str, verb: str, by: str | None) -> None:
    place = reach(run)
    item, state = _find(run, incident), read_status(place)["state"]
    if state != "running":
        typer.echo(f"the run has {state}: nobody is there to take up an answer", err=True)
        raise typer.Exit(1)
    if item["state"] != "awaiting":
        typer.echo(f"{incident} is {item['state']}: nothing waits for an answer", err=True)
        raise typer.Exit(1)
    push(place, verb, {"argument": item["decision"]["id"], "who": by or getpass.getuser()})
    typer.echo(f"{verb} sent; the run takes it up within a second or at its next step")


def _find(run: str, incident: str) -> dict[str, Any]:
    incidents = read_status(reach(run)).get("incidents", [])
    for item in incidents:
        if item["id"] == incident:
            found: dict[str, Any] = item
            return found
    known = ", ".join(i["id"] for i in incidents) or "none"
    typer.echo(f"no incident {incident!r} in this run; it has: {known}", err=True)
    raise typer.Exit(1)
