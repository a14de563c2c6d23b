"""The page that a person reads after a run: verdict, runs, pictures, record. Last stop of the review.

`report.html` stands alone: no script, nothing fetched (its own policy forbids both) and every text escaped,
because records, labels and facts are untrusted. `report.png` is the same in one picture.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshock import __version__
from foreshock.remediation.audit import AuditRecord, Verdict, verify
from foreshock.review import figures
from foreshock.review.views import MISSHAPEN, RunView, story, subject
from foreshock.review.words import TAIL, excess, final, say, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE = ("recovery_point", "outlier")
"""Kinds of which a stretch is folded into one row."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style>
{style}</style></head>
<body><main>
<header><h1>{title}</h1><p class="verdict">{verdict}</p>{broken}</header>
<section><h2>Runs</h2>{runs}</section>
{pictures}
<section><h2>Record of the run {label}</h2>{trail}</section>
<section><h2>Facts</h2>{facts}</section>
<section><h2>What this report does not show</h2>{limits}</section>
<footer><p>Written by {versions}.</p></footer>
</main></body></html>
"""


class Html(str):
    """Text that is markup already; any other is escaped."""


def write_report(
    out: Path, title: str, views: Sequence[RunView], onset: int | None, facts: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write `out`/report.html and `out`/report.png; their paths.

    `views` holds at least one run; the record shown is the `subject`'s. `onset` is the true one, in steps,
    where the fault was made, None in real life. `facts` are shown as they are. Raises OSError where it cannot
    write, foreshock.pipeline.store.StoreError where a view's directory has no readable record.
    """
    out.mkdir(parents=True, exist_ok=True)
    page, picture = out / "report.html", out / "report.png"
    page.write_bytes(_page(title, views, onset, facts).encode("utf-8", "replace"))
    figures.png(figures.summary(views, onset), picture)
    return page, picture


def _page(title: str, views: Sequence[RunView], onset: int | None, facts: Mapping[str, Any]) -> str:
    view, said = subject(views), verdict(views, onset)
    chain = _chain(view)
    drawn = {"Losses": figures.losses(views, onset), "What was measured": figures.signals(views, onset)}
    return PAGE.format(
        title=escape(title),
        style=files("foreshock.review").joinpath("page.css").read_text(encoding="utf-8"),
        verdict=escape(said),
        broken="" if chain.ok else '<p class="bad">The record is broken; do not trust what it says.</p>',
        runs=_runs(views),
        pictures="\n".join(_picture(name, figure, said) for name, figure in drawn.items() if figure),
        label=escape(view.label),
        trail=_trail(view.audit, chain),
        facts=_table("plain", ("Name", "Value"), ((name, _fact(value)) for name, value in facts.items())),
        limits=f"<ul>{''.join(f'<li>{escape(limit)}</li>' for limit in _limits(views, onset))}</ul>",
        versions=escape(_versions()),
    )


def _table(kind: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A table of class `kind`; the first cell of a row names it."""
    names = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [f"<tr>{names}</tr>"]
    for name, *cells in rows:
        rest = "".join(f"<td>{cell if isinstance(cell, Html) else escape(str(cell))}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(str(name))}</th>{rest}</tr>')
    return Html(f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>')


def _runs(views: Sequence[RunView]) -> Html:
    rows: list[Sequence[Any]] = []
    for view in views:
        steps, end, gap = int(np.isfinite(view.loss).sum()), final(view), excess(view, views)
        losses = (f"{end:.3f}" if steps else "–", "–" if gap is None else f"{gap:+.3f}")
        acts = [name for _, actions in story(view).done for action in actions for name in action]
        counts = (view.count("alarm.opened"), view.count("diagnosis"))
        rows.append((view.label, f"{steps:,}", *losses, *counts, ", ".join(acts) or "none"))
    head = ("Run", "Steps", "Final loss", "Above clean", "Alarms", "Diagnoses", "Actions")
    note = f"Losses in nats, means over the last {TAIL} steps; over the same steps where runs are compared."
    return Html(f'{_table("numbers", head, rows)}<p class="note">{note}</p>')


def _picture(name: str, figure: Figure, said: str) -> str:
    label = escape(f"{name} of the runs by trainer step. {said}")
    drawn = figures.svg(figure).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f'<section><h2>{name}</h2><figure><div class="wide" tabindex="0">{drawn}</div></figure></section>'


def _trail(audit: Sequence[AuditRecord], chain: Verdict) -> Html:
    rows: list[Sequence[Any]] = []
    for noise, stretch in groupby(audit, key=lambda record: record.kind in NOISE):
        records = list(stretch)
        rows += [_row(records)] if noise and len(records) > 1 else [_row([record]) for record in records]
    said = f"Hash chain: {chain.reason}." + (f" The last hash is {audit[-1].hash}." if audit else "")
    note = (
        f'<p class="{"note" if chain.ok else "bad"}">{escape(said)} Each line opens to what was recorded.</p>'
    )
    return Html(note + _table("trail", ("No.", "Step", "Time, UTC", "What happened"), rows))


def _row(records: Sequence[AuditRecord]) -> Sequence[Any]:
    """One record, or a stretch of noise."""
    first, last = records[0], records[-1]
    steps = [record.payload["step"] for record in (first, last) if "step" in record.payload]
    text, inside = say(first), f"{first.kind}\n{json.dumps(first.payload, indent=1, ensure_ascii=False)}"
    if first is not last:
        kinds = [record.kind for record in records]
        counts = {kind.replace("_", " "): kinds.count(kind) for kind in dict.fromkeys(kinds)}
        text = ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items()) + "."
        inside = "\n".join(f"{record.sequence} {say(record)}" for record in records)
    what = f"<details><summary>{escape(text)}</summary><pre>{escape(inside)}</pre></details>"
    return _range(first.sequence, last.sequence), _range(*steps), _when(first), Html(what)


def _range(*ends: Any) -> str:
    return "–".join(dict.fromkeys(str(end) for end in ends))


def _when(record: AuditRecord) -> str:
    try:
        return datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (*MISSHAPEN, OSError):
        return "unreadable"


def _chain(view: RunView) -> Verdict:
    """Checked against the anchor where the run's store is there, else by itself."""
    if view.directory is None:
        return verify(view.audit)
    from foreshock.pipeline.store import RunStore

    with closing(RunStore.open_readonly(Path(view.directory))) as store:
        return store.verify()


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _limits(views: Sequence[RunView], onset: int | None) -> tuple[str, ...]:
    """What a sceptic asks next, said before it is asked."""
    return (
        "One seed each: how often it goes like this is a question for many runs, not for this page."
        if any(excess(view, views) is not None for view in views)
        else "There is no clean run beside it, so what the loss would have been is not known.",
        "The true onset is known because the fault was made on purpose."
        if onset is not None
        else "The true onset is not known; the interval in the record is an estimate.",
        "Signals are sampled, averaged over heads, drawn for the lowest layer: a single head may not show.",
        "The hash chain finds accidents and edits, not an owner who rewrites both record and anchor.",
    )


def _versions() -> str:
    found = [f"python {platform.python_version()}", f"foreshock {__version__}"]
    for name in ("torch", "numpy", "river", "matplotlib"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
