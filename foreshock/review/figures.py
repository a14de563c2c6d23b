"""The pictures: losses and signals of the runs over the trainer's steps. Third stop of the review.

Takes `RunView`s, hands `report` SVG text for the page and one PNG. Matplotlib's object API only: no window, no
global state. Colours are hexadecimal in the file and CSS variables on the page, so that it can go dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.review.views import RunView, by_layer, marks, subject
from foreshock.review.words import above
from foreshock.signals import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE = "#1f2328", "#59636e", "#d0d7de"
COLOURS = {"clean": "#6e7781", "unprotected": "#bc4c00", "protected": "#0969da"}
OTHERS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")
PAINT = {INK: "ink", MUTED: "muted", RULE: "rule", **dict(zip(OTHERS, ("blue", "orange", "green", "purple"), strict=True)), "#6e7781": "grey"}
WINDOW = 10
"""Steps over which losses are smoothed: a trailing mean, so that nothing shows before it happened."""


@dataclass
class Panel:
    """One plot: `curves` are (run's index, steps, values, strong); `band` is shaded, `limit` a threshold."""

    title: str
    curves: list[tuple[int, NDArray[Any], Floats, bool]] = field(default_factory=list)
    height: float = 1.0
    band: tuple[float, float] | None = None
    limit: float | None = None
    log: bool = False

    def span(self) -> tuple[float, float]:
        """What of the y axis to show. The first tenth, where a loss falls from log(vocabulary), may be cut."""
        end = max(float(steps.max(initial=0)) for _, steps, _, _ in self.curves)
        seen = np.concatenate([v[s >= end / 10] for _, s, v, strong in self.curves if strong])
        seen = np.append(seen[np.isfinite(seen)], [x for x in (*(self.band or ()), self.limit) if x is not None])
        low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
        if self.log:
            return low / 1.2, high * 1.2
        pad = 0.06 * (high - low) or 0.5
        return low - pad, high + pad


def colour(views: Sequence[RunView], i: int) -> str:
    return COLOURS.get(views[i].name, OTHERS[i % len(OTHERS)])


def losses(views: Sequence[RunView], onset: int | None) -> Figure:
    """Losses, and below them what they cost above the clean run, where there is one."""
    return _draw([p for p in (_loss(views), _excess(views)) if p.curves], views, onset, 8.8)


def signals(views: Sequence[RunView], onset: int | None) -> Figure | None:
    """The source probe's score, h1, hqv and the gradient norm; None where none was measured."""
    panels = [p for p in (_score(views), _lowest(views, "h1"), _lowest(views, "hqv", -0.10), _norm(views)) if p.curves]
    return _draw(panels, views, onset, 8.8) if panels else None


def summary(views: Sequence[RunView], onset: int | None) -> Figure:
    """Losses, source score and hqv in one picture, 1600 pixels wide at its own resolution."""
    panels = [_loss(views), *(p for p in (_score(views), _lowest(views, "hqv", -0.10)) if p.curves)]
    return _draw(panels, views, onset, 10.0)


def svg(figure: Figure) -> str:
    """The figure as an <svg> element: the same bytes for the same figure, text as text, colours as variables."""
    import matplotlib

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "foreshock", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label in a script that matplotlib's own font lacks; the page's has it
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'<g id="[^"]*">', "<g>", out.getvalue()[out.getvalue().index("<svg") :])
    text = re.sub(r"font-family: [^;\"]*|(?<=px )'DejaVu Sans'[^;\"]*", "font-family: inherit", text)
    return re.sub("#[0-9a-f]{6}\\b", lambda m: f"var(--{PAINT[m[0]]}, {m[0]})" if m[0] in PAINT else m[0], text)


def smooth(x: Floats, n: int = WINDOW) -> Floats:
    """Trailing mean of the finite values among the last `n`, (N,) to (N,); NaN where x is not finite."""
    known = np.isfinite(x)
    total, count = (np.cumsum(v) for v in (np.where(known, x, 0.0), known.astype(np.float64)))
    total[n:], count[n:] = total[n:] - total[:-n], count[n:] - count[:-n]
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _loss(views: Sequence[RunView]) -> Panel:
    panel = Panel(f"Loss, nats: mean of {WINDOW} steps, single steps faint behind", height=2.0)
    for strong in (False, True):
        for i, view in enumerate(views):
            panel.curves.append((i, np.arange(view.loss.size), smooth(view.loss) if strong else view.loss, strong))
    return panel


def _excess(views: Sequence[RunView]) -> Panel:
    panel = Panel(f"Loss above the clean run, nats, mean of {WINDOW} steps", height=0.9, limit=0.0)
    for i, view in enumerate(views):
        if view.name != "clean" and (clean := next((v for v in views if v.name == "clean"), None)) is not None:
            gap = smooth(above(view, clean))
            panel.curves.append((i, np.arange(gap.size), gap, True))
    return panel


def _score(views: Sequence[RunView]) -> Panel:
    panel = Panel("Source probe: score of each layer. Shaded, ±3: where honest rounding stays", height=1.2, band=(-3, 3))
    for i, view in enumerate(views):
        for steps, total, count in by_layer(view, "attention.source_t").values():
            panel.curves.append((i, steps, total / np.sqrt(count), True))
    return panel


def _lowest(views: Sequence[RunView], name: str, limit: float | None = None) -> Panel:
    what = {"h1": "Entropy of the QK update, h1", "hqv": "Entropy of the Q update less the V update, hqv"}[name]
    panel = Panel(f"{what}: mean over heads, lowest layer", limit=limit)
    for i, view in enumerate(views):
        lowest: dict[int, float] = {}
        for steps, total, count in by_layer(view, f"attention.{name}").values():
            for step, mean in zip(steps.tolist(), (total / count).tolist(), strict=True):
                lowest[step] = min(mean, lowest.get(step, mean))
        if lowest:
            panel.curves.append((i, np.array(sorted(lowest)), np.array([lowest[s] for s in sorted(lowest)]), True))
    return panel


def _norm(views: Sequence[RunView]) -> Panel:
    panel = Panel(f"Gradient norm, mean of {WINDOW} measurements, logarithmic", log=True)
    for i, view in enumerate(views):
        steps, values = view.signals.get("symptom.grad_norm", (np.zeros(0), np.zeros(0)))
        if np.isfinite(values).any():
            panel.curves.append((i, steps, smooth(np.where(values > 0, values, np.nan)), True))
    return panel


def _draw(panels: Sequence[Panel], views: Sequence[RunView], onset: int | None, width: float) -> Figure:
    from matplotlib.figure import Figure

    end = max(view.loss.size for view in views)
    flags = _flags(views, onset, end, width - 2.12)
    top, gap, bottom, inch = 0.34 + 0.2 * (1 + max((row for *_, row in flags), default=-1)), 0.42, 0.5, 1.35
    heights = [p.height * inch for p in panels]
    height = top + sum(heights) + gap * (len(panels) - 1) + bottom
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    y, left, right = height - top, 0.62 / width, 1 - 1.5 / width
    for n, (panel, tall) in enumerate(zip(panels, heights, strict=True)):
        y -= tall
        axes = figure.add_axes((left, y / height, right - left, tall / height))
        _curves(axes, panel, views)
        axes.set_xlim(0, max(end, 1))
        axes.tick_params(labelbottom=n == len(panels) - 1)
        axes.annotate(
            panel.title, (0, 1), (0, top * 72 - 15 if n == 0 else 6), "axes fraction", "offset points",
            color=INK, fontsize=9.5, fontweight="bold",
        )  # fmt: skip
        for step, label, row in flags:
            axes.axvline(step, color=INK, lw=0.9, ls=(0, (1, 1.5)) if label.startswith("onset") else "-", zorder=1)
            if n == 0:
                rise = (4 + 14.4 * row) / 72 / tall
                axes.plot([step, step], [1, 1 + rise + 0.1 / tall], transform=axes.get_xaxis_transform(), color=INK, lw=0.9, clip_on=False)
                axes.annotate(label, (step, 1 + rise), (3, 0), axes.get_xaxis_transform(), "offset points", color=INK, fontsize=9)
        y -= gap
    figure.axes[-1].set_xlabel("trainer step", color=MUTED, fontsize=9)
    _name(figure.axes[0], panels[0], views)
    return figure


def _curves(axes: Axes, panel: Panel, views: Sequence[RunView]) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for i, steps, values, strong in panel.curves:
        weight = {"lw": 1.3} if strong else {"lw": 0.5, "alpha": 0.3}
        shown = np.where(np.isfinite(values), values, np.nan)
        axes.plot(steps, shown, color=colour(views, i), zorder=3 if strong else 2, **weight)
    if panel.band:
        axes.axhspan(*panel.band, color=RULE, alpha=0.5, lw=0, zorder=0)
    if panel.limit is not None:
        axes.axhline(panel.limit, color=MUTED, lw=0.9, ls=(0, (4, 2)), zorder=1)
    if panel.log:
        axes.set_yscale("log", subs=[2, 5])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(*panel.span())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for which in ("major", "minor"):
        axes.yaxis.set_tick_params(which=which, labelsize=9, labelcolor=MUTED, length=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_tick_params(labelsize=9, labelcolor=MUTED, color=RULE)
    axes.grid(axis="y", which="both", color=RULE, lw=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)


def _flags(views: Sequence[RunView], onset: int | None, end: int, width: float) -> list[tuple[int, str, int]]:
    """(step, label, row) of each mark; rows rise to the left, so that no line runs through a label."""
    seen = marks(subject(views), onset)
    words = {"onset": seen.onset, "alarm": seen.alarm, "action": seen.applied, "recovered": seen.verified}
    flags: list[tuple[int, str, int]] = []
    for step, word in sorted(((s, w) for w, s in words.items() if s is not None), key=lambda m: -m[0]):
        label = f"{word} {step}"
        reach = step + len(label) * 0.08 * end / width
        over = [row for other, _, row in flags if other <= reach]
        flags.append((step, label, max(over, default=-1) + 1))
    return flags


def _name(axes: Axes, panel: Panel, views: Sequence[RunView]) -> None:
    """Each run's name at the right end of its curve, moved apart where two end together."""
    low, high = axes.get_ylim()
    ends = {i: v[np.isfinite(v)][-1] for i, _, v, strong in panel.curves if strong and np.isfinite(v).any()}
    at, gap = -1.0, 0.2 / (axes.get_position().height * axes.figure.get_figheight())
    for i, value in sorted(ends.items(), key=lambda e: float(e[1])):
        at = max(at + gap, min(float((value - low) / (high - low)), 1.0))
        axes.annotate(
            views[i].label, (1, at), (6, 0), "axes fraction", "offset points",
            color=colour(views, i), fontsize=9.5, va="center", parse_math=False, annotation_clip=False,
        )  # fmt: skip
