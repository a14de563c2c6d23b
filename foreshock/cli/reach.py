"""Where a command finds a run: its directory, or, on another machine, its hub in the Ray cluster at RAY_ADDRESS."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from foreshock.cli.runs_dir import find_run

ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Hub:
    """A run's hub that answers, and what it said of itself."""

    actor: Any
    facts: dict[str, Any]


def reach(run: str) -> Path | Hub:
    """The run's directory if it is here, else its hub. Raises typer.BadParameter, which says what there is."""
    try:
        return find_run(run)
    except typer.BadParameter as missing:
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            raise typer.BadParameter(f"{missing}; RAY_ADDRESS names a cluster to look in") from None
        hubs = list(_hubs(address))
        for hub in hubs:
            if run in (hub.facts["run"], hub.facts["directory"]):
                return hub
        known = ", ".join(hub.facts["run"] for hub in hubs) or "none"
        raise typer.BadParameter(f"{missing}; hubs of the cluster at {address}: {known}") from None


def read_status(place: Path | Hub) -> dict[str, Any]:
    """What the run last said of itself; `state` is "died" where its process is gone without a word."""
    if isinstance(place, Hub):
        return place.facts
    from foreshock.pipeline.store import RunStore, StoreError

    try:
        with RunStore.open_readonly(place) as store:
            text = store.get_meta("status")
        status: dict[str, Any] = json.loads(text) if text else {"state": "empty", "run": place.name}
    except (StoreError, ValueError) as error:
        typer.echo(f"{place}: {error}", err=True)
        raise typer.Exit(1) from None
    if (
        status["state"] == "running"
        and status.get("host") == os.uname().nodename
        and not _alive(status["pid"])
    ):
        status["state"] = "died"
    return status


def push(place: Path | Hub, kind: str, payload: dict[str, Any]) -> None:
    """Leave a person's request with the run."""
    if isinstance(place, Hub):
        import ray

        ray.get(place.actor.push.remote(kind, payload), timeout=ANSWER_SECONDS)
        return
    from foreshock.pipeline.store import RunStore

    with RunStore(place) as store:
        store.push(kind, payload)


def _hubs(address: str) -> Iterator[Hub]:
    import ray
    from ray.exceptions import RayError

    from foreshock.pipeline.cluster.actor import NAMESPACE, PREFIX

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(
            f"the Ray cluster at RAY_ADDRESS={address} does not answer: {error}"
        ) from None
    for item in ray.util.list_named_actors(all_namespaces=True):
        if item["namespace"] == NAMESPACE and item["name"].startswith(PREFIX):
            try:
                actor = ray.get_actor(item["name"], namespace=NAMESPACE)
                yield Hub(actor, ray.get(actor.status.remote(), timeout=ANSWER_SECONDS))
            except (RayError, ValueError):
                continue


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
