"""The whole floor in one object: closed steps in; alarms, diagnoses and references for verification out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreshock.detectors.absolute import HQV, MISMATCH, AbsoluteDetector
from foreshock.detectors.bank import Bank
from foreshock.detectors.diagnosis import diagnose
from foreshock.detectors.gate import NonFiniteGate
from foreshock.detectors.latch import Latches
from foreshock.detectors.null import SourceDetector
from foreshock.detectors.signature import DECIDING, LOSS, UPDATE
from foreshock.detectors.spec import DEFAULT, SignalSpec
from foreshock.detectors.streams import Reader, Sheet, plan
from foreshock.detectors.types import Alarm, Diagnosis, Mechanism
from foreshock.signals import ClosedStep, SignalTable

SETTLE, WARMED = 64, 8
COHORT = 8
"""Up to this many ranks each has streams of its own; beyond it the ranks are one cohort."""
HELD = ((50, 0.014), (100, 0.0033))
"""Prefix samples -> P(false alarm in 1,000 samples) a stream, the upper end of what was measured."""
_RINGS = ("history", "references")


@dataclass(frozen=True, slots=True)
class Report:
    """What one step brought: `diagnoses` are all current ones, the rest is new in this step.

    `reasons` says why each of `closed` closed ("in band", "action", "relearned", "rewound"); `outliers`
    (step, key) are single innovations beyond 8 MAD; `suspects` all open alarms of deciding signals without a
    diagnosis; `seen` signals whose evidence became significant but is immaterial.
    """

    opened: tuple[Alarm, ...] = ()
    closed: tuple[Alarm, ...] = ()
    reasons: tuple[str, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    outliers: tuple[tuple[int, str], ...] = ()
    suspects: tuple[Alarm, ...] = ()
    seen: tuple[str, ...] = ()


class Detectors:
    """All detectors of one run. No clock, no I/O: the same steps give the same reports, bit for bit.

    `budget_steps` is the mean number of steps between false alarms of all signals together. `start` is the
    step from which baselines are learned; by default twice the warm-up, whose end is the last step of the
    first rise of symptom.lr, and never before 64 steps. `sources=False` turns the source probe's rules off.

    `world` is how many ranks send rows. Beyond `COHORT` a key of scope per_rank has one stream, the mean over who
    measured it, so streams grow with layers and heads, not with ranks; then only the non-finite gate names ranks.
    For a score with a known null this is conservative: the mean of m standard scores, however they depend on
    each other, has a variance between 0 and 1, so the e-values stay e-values. The price is power: a bias that
    the ranks share keeps its size, one of random sign shrinks to 1/sqrt(m), one rank's alone to 1/m.

    >>> from foreshock.signals import SignalFrame, SignalKey, merge
    >>> t, bias = (SignalKey("attention", n, 0, 0, scope="per_rank") for n in ("source_t", "source_bias"))
    >>> table = SignalTable((t, bias))
    >>> detectors = Detectors(table)
    >>> place = dict(run="r", attempt=0, rank=0, seq=0, timeline=0, table=table.id)
    >>> for step in range(0, 40, 4):
    ...     frame = SignalFrame.build([12.0, 2e-3] if step >= 20 else [0.5, 1e-5], step=step, **place)
    ...     for d in detectors.update(merge([frame])).diagnoses[:1]:
    ...         print(step, d.mechanism, d.confidence, d.layers)
    20 attention confirmed (0,)
    24 attention confirmed (0,)
    28 attention confirmed (0,)
    32 attention confirmed (0,)
    36 attention confirmed (0,)
    """

    def __init__(
        self,
        table: SignalTable,
        specs: Sequence[SignalSpec] = DEFAULT,
        budget_steps: float = 1e5,
        start: int | None = None,
        sources: bool = True,
        world: int = 1,
    ) -> None:
        self._names = [f"{k.mechanism}.{k.name}" for k in table.values]
        present = set(self._names)
        self.table, self.budget_steps, self.sources = table, budget_steps, sources
        self.specs = [s for s in specs if s.signal in present and s.kind == "residual"]
        self._null = next((s for s in specs if s.kind == "null" and s.signal in present and sources), None)
        self.signals = len(self.specs) + (self._null is not None)
        self._rates = [i for i, name in enumerate(self._names) if name == "symptom.lr"]
        self.start, self.world = start, world
        self.latches = Latches()
        self._gate = NonFiniteGate(table)
        self._ranks: list[int] = []
        self.first = self._rate_step = 0
        self._rate = math.nan
        self._silent: list[int] | None = None
        self._since: dict[str, list[int]] = {}
        self._confounded = False
        self._outliers: deque[tuple[int, str]] = deque(maxlen=256)
        self._build([])

    def _build(self, ranks: Sequence[int]) -> None:
        """Plan every index once, initial ranks first, so that a new rank only appends streams."""

        def streams(*signals: str) -> Any:
            batches = [plan(self.table, signals, [r], replicated=not i) for i, r in enumerate(ranks)]
            return [s for batch in batches for s in batch]

        self._ranks = list(ranks)
        learned = streams(*(s.signal for s in self.specs))
        self.bank = Bank(self.specs, learned, self.budget_steps, self.signals)
        self._x = np.full(len(learned), np.nan)
        ruled = [(rule, streams(rule.signal)) for rule in ((HQV, MISMATCH) if self.sources else (HQV,))]
        self.rules = [AbsoluteDetector(rule, chosen, self.first) for rule, chosen in ruled]
        name, threshold, scores = "attention.source_t", math.inf, []
        if self._null is not None:
            name, threshold = self._null.signal, self._null.threshold(self.budget_steps, self.signals)
            scores = streams(name)
        biases = {(s.key.layer, s.key.head, s.rank): s for s in streams(name.removesuffix("_t") + "_bias")}
        pairs = [(s, biases.get((s.key.layer, s.key.head, s.rank))) for s in scores]
        scores, paired = [s for s, b in pairs if b], [b for _, b in pairs if b]
        self.source = SourceDetector(scores, threshold)
        self._read = Reader(learned, scores, paired, *(chosen for _, chosen in ruled))
        self._rows: dict[str, list[int]] = {}
        for i, stream in enumerate(learned):
            self._rows.setdefault(str(stream.key), []).append(i)
        self._layer_rows: dict[str, list[int]] = {}
        for i, (layer, _) in enumerate(self.source.places):
            self._layer_rows.setdefault(f"{name}[L{layer}]", []).append(i)

    def _parts(self) -> dict[str, Any]:
        return {"bank": self.bank, "source": self.source, **{rule.name: rule for rule in self.rules}}

    def _grow(self, ranks: Iterable[int]) -> None:
        new = [r for r in ranks if r not in self._ranks]
        if new:
            before = self._parts() if self._ranks else {}
            self._build([*self._ranks, *new])
            for name, part in before.items():
                self._parts()[name].adopt(part)

    def update(self, closed: ClosedStep) -> Report:
        """One closed step; steps come in order, and go back only through `restore`."""
        step = closed.step
        if not self._ranks:
            self.first = self._rate_step = step
        self._grow(closed.ranks if self.world <= COHORT else [-1])
        self._gate.update(closed, self.latches)
        self._x, score, bias, *ruled = self._read(Sheet(closed))
        self.bank.update(step, self._admitted(step, closed), self.latches)
        keys = [self.bank.streams_of[i] for i in self.bank.outliers]
        rivals = {LOSS, UPDATE} - set(self.latches.open)  # once in alarm, how it began is settled
        self._outliers.extend((step, s.signal) for s in keys if s.signal in rivals)
        settled = self.start is not None and step >= self.start
        for rule, x in zip(self.rules, ruled, strict=True):
            if settled or not rule.rule.settled:
                rule.update(step, x, self.latches, self.bank.onset)
        was_seen = self.source.seen
        self.source.update(step, score, bias, self.latches)
        diagnoses = self._diagnose(step, closed)
        explained = [a for d in diagnoses for a in d.alarms]
        opened, ended = self.latches.drain()
        return Report(
            opened=tuple(opened),
            closed=tuple(a for a, _ in ended),
            reasons=tuple(reason for _, reason in ended),
            diagnoses=diagnoses,
            outliers=tuple((step, str(s.key)) for s in keys),
            suspects=tuple(
                a for a in self.latches.open.values() if a.signal in DECIDING and a not in explained
            ),
            seen=(self._null.signal,) if self._null and self.source.seen and not was_seen else (),
        )

    def _admitted(self, step: int, closed: ClosedStep) -> Any:
        """The raw values that may be learned from: not before the start, not in an announced hold."""
        if self.start is None:
            rate = float(np.fmax.reduce(closed.values[:, self._rates], axis=None, initial=np.nan))
            rate = self._rate if math.isnan(rate) else rate
            if rate > self._rate:
                self._rate_step = step
            elif step - self._rate_step >= WARMED:
                self.start = self.first + max(SETTLE, 2 * (self._rate_step - self.first))
            self._rate = rate
        silent = self._silent is not None and step >= self._silent[0]
        if self._silent is not None and step >= self._silent[1]:
            self._silent, silent = None, False
            self._relearn()
        if self.start is None or step < self.start or silent:
            return np.full(self._x.size, np.nan)
        return np.where(self.bank.mask((LOSS, UPDATE)), self._x, np.nan) if self._confounded else self._x

    def _diagnose(self, step: int, closed: ClosedStep) -> tuple[Diagnosis, ...]:
        alarms = list(self.latches.open.values())
        found = diagnose(alarms, step, self._outliers) if alarms else ()
        names = {str(d.mechanism) for d in found}
        previous, self._since = self._since, {n: self._since.get(n, [step, 0]) for n in names}
        measured = (
            np.flatnonzero((np.isfinite(closed.values) | (closed.nonfinite > 0)).any(0)) if found else ()
        )
        evaluated = {self._names[i] for i in measured}
        dated = []
        for d in found:
            memory = self._since[str(d.mechanism)]
            memory[1] += memory[1] == 0 or not evaluated.isdisjoint(d.signals)
            dated.append(replace(d, since=memory[0], samples=memory[1]))
        confounding = {str(Mechanism.DATA), str(Mechanism.OPTIMIZER)}
        # while data or the rate moves everything, only the two that tell them apart go on; then all relearn
        self._confounded = bool(confounding & names)
        if confounding & set(previous) and not names:
            self._relearn()
        return tuple(dated)

    def _relearn(self) -> None:
        self.latches.close({s.signal for s in self.specs}, "relearned")
        self.bank.restart()

    def announce(self, kind: str, step: int, duration: int) -> None:
        """A known cause (`kind`: schedule, resume, mix ...): for `duration` steps from `step` on learned
        baselines hold, then they are learned anew. Gate, source probe and absolute rules go on."""
        if duration < 0:
            raise ValueError(f"{kind}: a hold cannot last {duration} steps")
        begin, end = self._silent or [step, step]
        self._silent = [min(begin, step), max(end, step + duration)]

    def after_action(self, step: int, layers: Collection[int] | None = None) -> None:
        """An action was applied at `step` to these layers (None: the whole model). Evidence there is
        forgotten, alarms there close with reason "action" (in the next report), the absolute rules wait for
        a full window. References and running baselines stay."""
        self.bank.reset({s.signal for s in self.specs}, layers)
        self.source.reset(layers)
        for rule in self.rules:
            rule.restart(step)
        done = {r for r, a in self.latches.open.items() if layers is None or set(a.layers) & set(layers)}
        self.latches.close(done, "action")

    def verification_keys(self, diagnosis: Diagnosis) -> tuple[str, ...]:
        """The streams to bring back in band: the diagnosed signals in the diagnosed layers (the loss if none
        of them is learned), as str(SignalKey); the source probe by layer, "attention.source_t[L0]"."""
        places = {str(s.key): (s.signal, s.layer) for s in self.bank.streams_of}
        if self._null is not None:
            places |= {f"{self._null.signal}[L{n}]": (self._null.signal, n) for n, _ in self.source.places}
        within = {*diagnosis.layers, -1}
        keys = [
            key
            for key, (signal, layer) in places.items()
            if signal in diagnosis.signals and (layer in within or not diagnosis.layers)
        ]
        return tuple(keys or [key for key in places if key == LOSS])

    def reference(self, keys: Iterable[str], at_step: int) -> dict[str, tuple[float, float]]:
        """(level, marginal sd) of each key as it stood at `at_step`, the onset's early end; keys without a
        baseline are left out. The source probe's layer score has the known null (0, 1), and a signal with an
        absolute rule that bound at 3 sigma where nothing was learned yet."""
        bounds = {rule.rule.signal: (0.0, abs(rule.rule.bound) / 3) for rule in self.rules}
        found: dict[str, tuple[float, float]] = {}
        for key in keys:
            rows = self._rows.get(key, [])
            known = (0.0, 1.0) if key in self._layer_rows else self.bank.reference(rows, at_step)
            if known is None and rows:
                known = bounds.get(self.bank.streams_of[rows[0]].signal)
            if known is not None:
                found[key] = known
        return found

    def current(self, keys: Iterable[str]) -> dict[str, tuple[float, float]]:
        """(value of the last step, marginal sd of the running baseline): mean over ranks, of the source probe
        the worst rank. Keys not measured are left out. In band of a reference: |value - level| <= k·sd."""
        found = {}
        for key in keys:
            if key in self._layer_rows:
                x = self.source.latest[self._layer_rows[key]]
                x = x[np.isfinite(x)]
                value, sd = x[np.abs(x) == np.abs(x).max(initial=0.0)][:1], 1.0
            else:
                rows = [row for row in self._rows.get(key, []) if np.isfinite(self._x[row])]
                value = self._x[rows].mean(keepdims=True) if rows else self._x[:0]
                sd = float(self.bank.residual.marginal[rows].mean()) if rows else math.nan
            if value.size:
                found[key] = float(value[0]), sd
        return found

    def budget_held(self) -> float | None:
        """P(false alarm in 1,000 samples) a stream that the shortest deciding prefix supports; provisional.

        None below 50 samples: no budget can be stated, only the absolute rules and the source probe speak.
        The measured upper ends .014 (50) and .0033 (100) are interpolated, a longer prefix claims no more."""
        count, samples = self.bank.residual.count, []
        for spec in (s for s in self.specs if s.role == "decides"):
            samples.append(int(count[self.bank.mask([spec.signal])].max(initial=0)))
        if min(samples, default=0) < HELD[0][0]:
            return None
        (a, pa), (b, pb) = HELD
        share = min(math.log(min(samples) / a) / math.log(b / a), 1.0)
        return float(pa * (pb / pa) ** share)

    def state_dict(self) -> dict[str, Any]:
        """Complete: after `load_state_dict` all later reports are identical, bit for bit."""
        return {
            "ranks": list(self._ranks),
            "world": self.world,
            "start": self.start,
            "first": self.first,
            "rate": None if math.isnan(self._rate) else self._rate,
            "rate_step": self._rate_step,
            "silent": self._silent,
            "since": {m: list(v) for m, v in self._since.items()},
            "confounded": self._confounded,
            "outliers": [list(o) for o in self._outliers],
            "latches": self.latches.state_dict(),
            "x": self._x.copy(),
            "latest": self.source.latest.copy(),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse, on an object made with the same table and settings."""
        self.world, self.start = state["world"], state["start"]
        self.first, self._rate_step = state["first"], state["rate_step"]
        self._rate = math.nan if state["rate"] is None else state["rate"]
        self._silent, self._confounded = state["silent"], state["confounded"]
        self._since = {m: list(v) for m, v in state["since"].items()}
        self._outliers = deque(((s, n) for s, n in state["outliers"]), maxlen=self._outliers.maxlen)
        self.latches.load_state_dict(state["latches"])
        self._build(state["ranks"])
        self._x, self.source.latest = state["x"].copy(), state["latest"].copy()
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def snapshot(self) -> dict[str, Any]:
        """The state without the rings, to be kept beside a recovery point."""
        state = self.state_dict()
        for name in ("bank", "source"):
            state[name] = {k: v for k, v in state[name].items() if k not in _RINGS}
        return state

    def restore(self, snapshot: dict[str, Any], step: int) -> None:
        """Rewind to a snapshot taken at `step`: its state, and our own rings up to that step.

        Alarms that opened since close with reason "rewound" in the next report."""
        ranks, before = self._ranks, list(self.latches.open.values())
        rings = [self.bank.history, self.bank.references, self.source.history]
        self.load_state_dict(snapshot)
        self._grow(ranks)
        self.bank.history, self.bank.references, self.source.history = rings
        for ring in rings:
            ring.truncate(step)
        kept = list(self.latches.open.values())
        self.latches.closed += [(a, "rewound") for a in before if a not in kept]
