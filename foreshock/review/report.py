"""The page that a person reads after a run: verdict, runs, pictures, record. Last stop of the review.

`report.html` stands alone: no script, nothing fetched (its own policy forbids both) and every text escaped,
because records, labels and facts are untrusted. `report.png` is the same in one picture.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.remediation.audit import AuditRecord, Verdict, verify
from foreshock.review import figures
from foreshock.review.views import RunView, story, subject
from foreshock.review.words import TAIL, excess, final, say, verdict

NOISE = ("recovery_point", "outlier")
"""Kinds of which a stretch is folded into one row."""
VERSIONS = ("foreshock", "torch", "numpy", "river", "matplotlib")

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


def write_report(
    out: Path, title: str, views: Sequence[RunView], onset: int | None, facts: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write `out`/report.html and `out`/report.png; their paths.

    `views` holds at least one run; the record shown is the `subject`'s. `onset` is the true one, in steps, where
    the fault was made, None in real life. `facts` are shown as they are; "versions" in it (name to version)
    stands for those of this process. Raises OSError where it cannot write.
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
    shown = {k: v for k, v in facts.items() if k != "versions"}
    return PAGE.format(
        title=escape(title),
        style=files("foreshock.review").joinpath("page.css").read_text(encoding="utf-8"),
        verdict=escape(said),
        broken="" if chain.ok else '<p class="bad">The record is broken; do not trust what it says.</p>',
        runs=_runs(views),
        pictures="\n".join(_picture(name, figure, said) for name, figure in drawn.items() if figure),
        label=escape(view.label),
        trail=_trail(view.audit, chain),
        facts=_table((), ((k, _text(v)) for k, v in shown.items())) if shown else "<p>None were given.</p>",
        limits=f"<ul>{''.join(f'<li>{escape(limit)}</li>' for limit in _limits(views, onset))}</ul>",
        versions=escape(_versions(facts.get("versions"))),
    )


def _runs(views: Sequence[RunView]) -> str:
    rows = []
    for view in views:
        gap, end = excess(view, views), final(view)
        acts = [name for _, actions in story(view).done for action in actions for name in action]
        rows.append((
            view.label, f"{np.isfinite(view.loss).sum():,}", f"{end:.3f}" if np.isfinite(end) else "–",
            "–" if gap is None else f"{gap:+.3f}", view.count("alarm.opened"), view.count("diagnosis"),
            ", ".join(acts) or "none",
        ))  # fmt: skip
    head = ("Run", "Steps", "Final loss", "Above clean", "Alarms", "Diagnoses", "Actions")
    note = f"Losses in nats, means over the last {TAIL} steps; over the same steps where runs are compared."
    return f'{_table(head, rows)}<p class="note">{note}</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain cells, escaped; the first one names its row, columns two to six of a table with a head are numbers."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th>{"".join(f"<td>{escape(str(c))}</td>" for c in cells)}</tr>'
        for name, *cells in rows
    )
    kind = "numbers" if head else "plain"
    return f'<div class="wide"><table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _picture(name: str, figure: Any, said: str) -> str:
    label = escape(f"{name} of the runs by trainer step. {said}")
    drawn = figures.svg(figure).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f'<section><h2>{name}</h2><figure><div class="wide" tabindex="0">{drawn}</div></figure></section>'


def _trail(audit: Sequence[AuditRecord], chain: Verdict) -> str:
    rows = []
    for noise, stretch in groupby(audit, key=lambda record: record.kind in NOISE):
        records = list(stretch)
        rows += [_row(records)] if noise and len(records) > 1 else [_row([record]) for record in records]
    note = f"Hash chain: {chain.reason}." + (f" The last hash is {audit[-1].hash}." if audit else "")
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("No.", "Step", "Time, UTC", "What happened"))
    return (
        f'<p class="{"note" if chain.ok else "bad"}">{escape(note)} Each line opens to what was recorded.</p>'
        f'<table class="trail"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _row(records: Sequence[AuditRecord]) -> str:
    """One record, or a stretch of noise."""
    first, last = records[0], records[-1]
    steps = [record.payload["step"] for record in (first, last) if "step" in record.payload]
    text, inside = say(first), f"{first.kind}\n{json.dumps(first.payload, indent=1, ensure_ascii=False)}"
    if len(records) > 1:
        kinds = [record.kind for record in records]
        text = ", ".join(f"{kinds.count(k)} times {k.replace('_', ' ')}" for k in dict.fromkeys(kinds)) + "."
        inside = "\n".join(f"{record.sequence} {say(record)}" for record in records)
    cells = (_range(first.sequence, last.sequence), _range(*steps), _when(first))
    return (
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td><details><summary>{escape(text)}</summary>"
        f"<pre>{escape(inside)}</pre></details></td></tr>"
    )


def _range(*ends: Any) -> str:
    return "–".join(dict.fromkeys(str(end) for end in ends))


def _when(record: AuditRecord) -> str:
    try:
        return datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError, TypeError):
        return "unreadable"


def _chain(view: RunView) -> Verdict:
    """Checked against the anchor where the run's store is there, else by itself."""
    if view.directory is None:
        return verify(view.audit)
    from foreshock.pipeline.store import RunStore

    with closing(RunStore.open_readonly(Path(view.directory))) as store:
        return store.verify()


def _text(value: Any) -> str:
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
        "Signals are sampled, averaged over heads and drawn for the lowest layer: a single head may not show.",
        "The hash chain finds accidents and edits, not an owner who rewrites both record and anchor.",
    )


def _versions(given: Any) -> str:
    known = dict(given) if isinstance(given, Mapping) else {"python": platform.python_version()}
    for name in VERSIONS if not isinstance(given, Mapping) else ():
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = "not installed"
    return ", ".join(f"{name} {number}" for name, number in known.items())
