"""The pictures: losses and signals of the runs over the trainer's steps. Third stop of the review.

Takes `RunView`s, hands `report` SVG text for the page and one PNG. Matplotlib's object API only, no global
state. Colours are hexadecimal in a file and CSS variables on the page, so that the page can go dark.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.review.views import RunView, by_layer, marks, subject
from foreshock.review.words import above, verdict
from foreshock.signals import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, GREY = "#1f2328", "#59636e", "#d0d7de", "#6e7781"
BLUE, ORANGE, GREEN, PURPLE = "#0969da", "#bc4c00", "#1a7f37", "#8250df"
NAMES = ("ink", "muted", "rule", "grey", "blue", "orange", "green", "purple")
PAINT = dict(zip((INK, MUTED, RULE, GREY, BLUE, ORANGE, GREEN, PURPLE), NAMES, strict=True))
"""Each colour's variable in page.css."""
WINDOW = 10
"""Steps over which losses are smoothed: a trailing mean, so that nothing shows before it happened."""
HEAD, GAP, FOOT, LEFT, RIGHT, ROW = 0.45, 0.42, 0.5, 0.62, 1.5, 0.2
"""Inches: above, between and below the panels, beside them, and what the label of a mark takes in height."""


@dataclass
class Panel:
    """One plot: `curves` are (number of the run, steps, values); `band` is shaded, `limit` a dashed line."""

    title: str
    curves: list[tuple[int, NDArray[Any], Floats]]
    height: float = 1.35
    band: tuple[float, ...] = ()
    limit: tuple[float, ...] = ()
    log: bool = False
    raw: bool = False
    """The curves are smoothed; draw the losses themselves faintly behind."""


def losses(views: Sequence[RunView], onset: int | None) -> Figure:
    """Losses and, where there is a clean run, what lies above it."""
    gaps = [(i, gap) for i, view in enumerate(views) if (gap := above(view, views)) is not None]
    curves = [(i, np.arange(gap.size), smooth(gap)) for i, gap in gaps]
    cost = Panel(f"Loss above the clean run, nats, mean of {WINDOW} steps", curves, 1.2, limit=(0.0,))
    return _draw([_loss(views), cost], views, onset, 8.8)


def signals(views: Sequence[RunView], onset: int | None) -> Figure | None:
    """The source probe's score, h1, hqv and the gradient norm; None where none of them was measured."""
    panels = [_score(views), _lowest(views, "h1"), _lowest(views, "hqv", -0.10), _norm(views)]
    return _draw(panels, views, onset, 8.8) if any(panel.curves for panel in panels) else None


def summary(views: Sequence[RunView], onset: int | None) -> Figure:
    """The verdict, losses, source score and hqv in one picture, 1600 pixels wide."""
    title = textwrap.wrap(_plain(verdict(views, onset)), 100)
    return _draw([_loss(views), _score(views), _lowest(views, "hqv", -0.10)], views, onset, 10.0, title)


def svg(figure: Figure) -> str:
    """The figure as an <svg> element: same figure, same bytes; text as text, colours as variables."""
    import matplotlib

    out, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": figure.get_label(), "svg.fonttype": "none"}):
        _save(figure, out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = re.sub(r'(?<=<g) id="[^"]*"', "", text[text.index("<svg") :])  # nothing points at groups
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    return re.sub("|".join(PAINT), lambda hit: f"var(--{PAINT[hit[0]]}, {hit[0]})", text)


def png(figure: Figure, path: Path) -> None:
    """The figure as a PNG, 160 pixels an inch."""
    _save(figure, path, format="png", dpi=160, metadata={"Software": None})


def colour(views: Sequence[RunView], i: int) -> str:
    """The colour of run `i`, by its role or else by its place."""
    roles = {"clean": GREY, "unprotected": ORANGE, "protected": BLUE}
    return roles.get(views[i].name, (BLUE, ORANGE, GREEN, PURPLE)[i % 4])


def smooth(x: Floats) -> Floats:
    """Mean of the finite values among the last `WINDOW`, (N,) to (N,); NaN where x is not finite."""
    known = np.isfinite(x)
    total, number = np.cumsum(np.where(known, x, 0.0)), np.cumsum(known, dtype=np.float64)
    total[WINDOW:], number[WINDOW:] = total[WINDOW:] - total[:-WINDOW], number[WINDOW:] - number[:-WINDOW]
    return np.where(known, total / np.maximum(number, 1), np.nan)


def _loss(views: Sequence[RunView]) -> Panel:
    curves = [(i, np.arange(view.loss.size), smooth(view.loss)) for i, view in enumerate(views)]
    return Panel(f"Loss, nats, mean of {WINDOW} steps; single steps faint", curves, 2.7, raw=True)


def _score(views: Sequence[RunView]) -> Panel:
    layers = [
        (i, *layer) for i, v in enumerate(views) for layer in by_layer(v, "attention.source_t").values()
    ]
    curves = [(i, steps, total / np.sqrt(number)) for i, steps, total, number in layers]
    return Panel(
        "Source probe, score of each layer; honest rounding stays in the shade", curves, 1.6, (-3.0, 3.0)
    )


def _lowest(views: Sequence[RunView], name: str, *limit: float) -> Panel:
    title = {
        "h1": "Entropy of the QK update, h1, lowest layer",
        "hqv": "Entropy of the Q update less that of V, hqv, lowest layer; dashed: alarm",
    }
    curves = []
    for i, view in enumerate(views):
        layers = [
            (steps, total / number) for steps, total, number in by_layer(view, f"attention.{name}").values()
        ]
        if layers:
            steps, where = np.unique(np.concatenate([s for s, _ in layers]), return_inverse=True)
            lowest = np.full(steps.size, np.inf)
            np.minimum.at(lowest, where, np.concatenate([means for _, means in layers]))
            curves.append((i, steps, lowest))
    return Panel(title[name], curves, limit=limit)


def _norm(views: Sequence[RunView]) -> Panel:
    norms = [(i, *view.signals.get("symptom.grad_norm", ((), np.zeros(0)))) for i, view in enumerate(views)]
    curves = [(i, np.asarray(s), smooth(np.where(x > 0, x, np.nan))) for i, s, x in norms if (x > 0).any()]
    return Panel(f"Gradient norm, mean of {WINDOW} values, logarithmic", curves, log=True)


def _draw(
    panels: Sequence[Panel],
    views: Sequence[RunView],
    onset: int | None,
    width: float,
    title: Sequence[str] = (),
) -> Figure:
    from matplotlib.figure import Figure

    panels = [panel for panel in panels if panel.curves]
    end = max(1, *(view.loss.size for view in views))
    flags = _flags(views, onset, end / (width - LEFT - RIGHT))
    head = HEAD + ROW * max((row + 1 for *_, row in flags), default=0)
    said, gaps = 0.3 * len(title), GAP * (len(panels) - 1)
    height = said + head + sum(panel.height for panel in panels) + gaps + FOOT
    figure = Figure((width, height), facecolor="white")
    figure.text(
        LEFT / width, 1 - 0.2 / height, "\n".join(title), va="top", color=INK, size=12, parse_math=False
    )
    figure.set_label(panels[0].title)  # salts the ids of its SVG: two figures stand on one page
    y = height - said - head + GAP
    for panel in panels:
        y -= panel.height + GAP
        box = (LEFT / width, y / height, 1 - (LEFT + RIGHT) / width, panel.height / height)
        axes = figure.add_axes(
            box, xlim=(0, end), ylim=_span(panel, end), yscale="log" if panel.log else "linear"
        )
        _curves(axes, panel, views)
        _style(axes, panel)
        for step, label, _ in flags:
            axes.axvline(step, color=MUTED, lw=0.9, ls=":" if label.startswith("onset") else "-", zorder=1)
    first, last = figure.axes[0], figure.axes[-1]
    for axes, panel in zip(figure.axes, panels, strict=True):
        lift = 72 * (head - 0.3) if axes is first else 6
        _note(axes, panel.title, (0, 1), (0, lift), color=INK, size=9.5, weight="bold")
    for step, label, row in flags:
        top = 1 + ROW * (row + 1) / panels[0].height
        first.plot(
            [step, step], [1, top], transform=first.get_xaxis_transform(), color=MUTED, lw=0.9, clip_on=False
        )
        _note(first, label, (step / end, top), (3, -9), color=INK, size=9)
    _name(first, panels[0], views)
    last.tick_params(labelbottom=True)
    last.set_xlabel("trainer step", color=MUTED, size=9)
    return figure


def _note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **look: Any) -> None:
    axes.annotate(_plain(text), at, shift, "axes fraction", "offset points", parse_math=False, **look)


def _plain(text: str) -> str:
    """Without what no font can draw and no XML may hold; labels are untrusted."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _flags(views: Sequence[RunView], onset: int | None, inch: float) -> list[tuple[int, str, int]]:
    """(step, label, row) of each mark; `inch` in steps. Rows rise to the left: no line crosses a label."""
    seen = marks(subject(views), onset)
    words = {"recovered": seen.verified, "action": seen.applied, "alarm": seen.alarm, "onset": seen.onset}
    flags: list[tuple[int, str, int]] = []
    for step, word in sorted(((s, w) for w, s in words.items() if s is not None), key=lambda m: -m[0]):
        reach = step + (0.15 + 0.08 * len(f"{word} {step}")) * inch
        flags.append((step, f"{word} {step}", max((r + 1 for s, _, r in flags if s <= reach), default=0)))
    return flags


def _span(panel: Panel, end: int) -> tuple[float, float]:
    """The y axis shows all but the top of the first sixth of the run, where a loss falls from its start."""
    seen = np.concatenate([values[steps >= end / 6] for _, steps, values in panel.curves])
    seen = np.array([*seen[np.isfinite(seen)], *panel.band, *panel.limit])
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.1, 1.0)
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low / 1.1, high * 1.1) if panel.log else (low - pad, high + pad)


def _curves(axes: Axes, panel: Panel, views: Sequence[RunView]) -> None:
    if panel.band:
        axes.axhspan(*panel.band, color=RULE, alpha=0.5, lw=0, zorder=0)
    for limit in panel.limit:
        axes.axhline(limit, color=MUTED, lw=0.9, ls=(0, (4, 2)), zorder=1)
    for i, steps, values in panel.curves:
        paint, clean = colour(views, i), views[i].name == "clean"
        if panel.raw:
            axes.plot(steps, views[i].loss, color=paint, lw=0.5, alpha=0.2)
        # the clean run lies broad and pale under the others, which ride on it while they are well
        wide, alpha = (3.2, 0.5) if clean and not panel.band else (1.2, 1.0)
        axes.plot(steps, values, color=paint, lw=wide, alpha=alpha, zorder=2 if clean else 3)


def _style(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    if panel.log:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(labelsize=9, labelcolor=MUTED, color=RULE, labelbottom=False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=RULE, lw=0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)


def _name(axes: Axes, panel: Panel, views: Sequence[RunView]) -> None:
    """Each run's name at the right end of its curve, moved apart where two end together."""
    low, high = axes.get_ylim()
    ends = {i: values[np.isfinite(values)][-1] for i, _, values in panel.curves if np.isfinite(values).any()}
    at = -1.0
    for i, value in sorted(ends.items(), key=lambda end: float(end[1])):
        at = max(at + ROW / panel.height, min(float((value - low) / (high - low)), 1.0))
        _note(axes, views[i].label, (1, at), (6, 0), color=colour(views, i), size=9.5, va="center")


def _save(figure: Figure, out: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label in a script that matplotlib's own font lacks
        figure.savefig(out, **options)
