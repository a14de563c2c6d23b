"""The page that a person reads after a run: verdict, runs, pictures, record. Last stop of the review.

`report.html` stands alone: no script, nothing fetched (its own policy forbids both), every text escaped, because
records, labels and facts are untrusted. `report.png` is the same in one picture.
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

from foreshock import __version__
from foreshock.remediation.audit import AuditRecord, Verdict, verify
from foreshock.review import figures
from foreshock.review.views import RunView, commands, marks, number, subject
from foreshock.review.words import TAIL, excess, final, say, verdict

NOISE = ("recovery_point", "outlier")
"""Kinds of which a stretch is folded into one row."""


def write_report(
    out: Path, title: str, views: Sequence[RunView], onset: int | None, facts: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write `out`/report.html and `out`/report.png; their paths.

    `views` has at least one run; the record shown is that of `views.subject`. `onset` is the true one, in steps,
    where the fault was made; None in real life. `facts` are shown as they are, under the picture; an entry
    "versions" (name to version) replaces those of this process. Raises OSError where it cannot write.
    """
    out.mkdir(parents=True, exist_ok=True)
    page, picture = out / "report.html", out / "report.png"
    page.write_bytes(_page(title, views, onset, facts).encode("utf-8", "replace"))
    figures.png(figures.summary(views, onset), picture)
    return page, picture


def _page(title: str, views: Sequence[RunView], onset: int | None, facts: Mapping[str, Any]) -> str:
    view = subject(views)
    chain = _chain(view)
    broken = "" if chain.ok else f'<p class="bad">The record is broken: {escape(chain.reason)}. Do not trust what follows.</p>'
    pictures = [(figures.losses(views, onset), "Losses"), (figures.signals(views, onset), "What Foreshock measured")]
    body = [
        f'<header><h1>{escape(title)}</h1><p class="verdict">{escape(verdict(views, onset))}</p>{broken}</header>',
        f"<h2>Runs</h2>{_runs(views)}",
        *(_figure(name, figures.svg(f), _alt(views, onset, name)) for f, name in pictures if f is not None),
        f"<h2>Record of the run {escape(view.label)}</h2>{_trail(view, chain)}",
        f"<h2>Facts</h2>{_facts(facts)}" if facts else "",
        f"<h2>What this report does not show</h2><ul>{''.join(f'<li>{escape(x)}</li>' for x in _limits(views, onset))}</ul>",
        f"<footer><p>{escape(_versions(facts))}</p></footer>",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>\n{files('foreshock.review').joinpath('page.css').read_text()}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def _runs(views: Sequence[RunView]) -> str:
    head = ("Run", "Steps", f"Final loss", "Above clean", "Alarms", "Diagnoses", "Actions")
    rows = []
    for i, view in enumerate(views):
        paint = figures.PAINT[figures.colour(views, i)]
        gap = excess(view, views)
        acts = [name for _, c in commands(view) for a in c.get("actions", []) for name in a]
        cells = [
            f"{int(np.isfinite(view.loss).sum()):,}", _number(final(view)), "–" if gap is None else f"{gap:+.3f}",
            len(view.payloads("alarm.opened")), len(view.payloads("diagnosis")),
        ]  # fmt: skip
        numbers = "".join(f'<td class="n">{escape(str(c))}</td>' for c in cells)
        rows.append(
            f'<tr><th scope="row"><span class="key" style="background:var(--{paint})"></span>{escape(view.label)}</th>'
            f"{numbers}<td>{escape(', '.join(acts) or 'none')}</td></tr>"
        )
    heads = "".join(f'<th scope="col"{" class=n" if 0 < n < 6 else ""}>{h}</th>' for n, h in enumerate(head))
    note = f'<p class="note">Losses in nats, means over the last {TAIL} steps, the same steps where runs are compared.</p>'
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}'


def _figure(name: str, picture: str, alt: str) -> str:
    label = f'role="img" aria-label="{escape(alt)}"'
    return f'<h2>{name}</h2><figure><div class="wide" tabindex="0" {label}>{picture}</div></figure>'
