"""Frames travel bit for bit, and merging them does not depend on who came first."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.signals import SignalFrame, combine, merge

PLACE = {"run": "r", "attempt": 1, "timeline": 0, "step": 7, "table": "t"}
INT64 = st.integers(-(2**63), 2**63 - 1)


def frame(rank, values, **rest):
    return SignalFrame.build(values, **{**PLACE, "rank": rank, "seq": 10 * rank, **rest})


@st.composite
def frames(draw):
    values = draw(st.lists(st.floats(width=32), max_size=40))
    return SignalFrame.build(
        values,
        counts=draw(st.lists(INT64, max_size=3)),
        sums=draw(st.lists(st.floats(), max_size=3)),
        run=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
        table=draw(st.text("0123456789abcdef", max_size=16)),
        **{name: draw(INT64) for name in ("attempt", "rank", "seq", "timeline", "step")},
    )


@given(frames())
def test_a_frame_comes_back_bit_for_bit(sent):
    got = SignalFrame.from_bytes(sent.to_bytes())
    for name in SignalFrame.__slots__:
        a, b = getattr(sent, name), getattr(got, name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.tobytes(), b.flags.writeable) == (b.dtype, b.tobytes(), True)
        else:
            assert a == b
    assert got == sent


@given(frames(), st.randoms())
def test_a_body_that_does_not_fit_its_header_is_refused(sent, rng):
    data = sent.to_bytes()
    for wrong in (data[: rng.randrange(len(data))], data + b"\0"):
        with pytest.raises(ValueError, match=r"header|buffer"):
            SignalFrame.from_bytes(wrong)


def test_what_was_not_measured_costs_a_bit():
    values = np.full(8000, np.nan)
    empty = len(frame(0, values).to_bytes())
    values[:80] = 1.0
    assert len(frame(0, values).to_bytes()) == empty + 80 * 4
    assert empty < 8000 / 8 + 100


@st.composite
def nodes(draw, most=4):
    """Frames of one step by node. The first value is measured by one rank, the others by whoever likes."""
    ranks = draw(st.integers(1, 6))
    measuring = draw(st.integers(0, ranks - 1))
    small = st.floats(-1e6, 1e6, width=32) | st.sampled_from([np.nan, np.inf])
    rows = [
        frame(
            rank,
            [
                draw(st.floats(-1e6, 1e6, width=32) | st.just(-0.0)) if rank == measuring else np.nan,
                draw(small),
                draw(small),
            ],
            counts=[draw(st.integers(-(2**59), 2**59))],
            sums=[draw(st.floats(-1e300, 1e300))],
        )
        for rank in range(ranks)
    ]
    cuts = sorted(draw(st.sets(st.integers(1, ranks), max_size=most - 1)) | {0, ranks})
    return rows, [rows[a:b] for a, b in itertools.pairwise(cuts)]


@given(nodes(), st.randoms())
@settings(max_examples=200)
def test_a_tree_of_relays_says_what_all_frames_say(made, rng):
    rows, parts = made
    shuffled = rng.sample(rows, len(rows))
    flat, one = merge(rows), combine(shuffled)
    assert one == combine(rows)
    assert (one.rank, one.seq) == (0, 0)
    tree = merge([combine(part) for part in parts])
    for got in (one.counts, tree.counts):
        assert got.tolist() == flat.counts.tolist() == [sum(int(f.counts[0]) for f in rows)]
    (measured,) = (f.values[:1].tobytes() for f in rows if not np.isnan(f.values[0]))
    (relayed,) = (row[:1].tobytes() for row in tree.values if not np.isnan(row[0]))
    assert one.values[:1].tobytes() == relayed == measured
    assert one.nonfinite.tolist() == tree.nonfinite.max(0).tolist() == flat.nonfinite.max(0).tolist()
    assert np.isnan(one.values[one.nonfinite > 0]).all()
    exact = sum(Fraction(float(f.sums[0])) for f in rows)
    assert one.sums[0] == flat.sums[0] == float(exact)
    largest = max(abs(float(combine(part).sums[0])) for part in parts)
    assert abs(Fraction(float(tree.sums[0])) - exact) <= 2 * len(parts) * Fraction(float(np.spacing(largest)))


@given(frames())
def test_one_frame_is_its_own_node(sent):
    assert combine([sent]) is sent


def test_a_value_is_the_mean_over_who_measured_it():
    got = combine([frame(4, [1.0, np.nan, np.nan]), frame(3, [4.0, 2.0, np.nan]), frame(5, [np.nan] * 3)])
    assert got.rank == 3
    assert got.values.tolist()[:2] == [2.5, 2.0]
    assert np.isnan(got.values[2])
    assert not got.nonfinite.any()


def test_sums_that_have_no_value_do_not_raise():
    for pair in ((np.inf, -np.inf), (1.7e308, 1.7e308)):
        rows = [frame(i, [], sums=[x]) for i, x in enumerate(pair)]
        assert np.isnan(merge(rows).sums).all()


@pytest.mark.parametrize("name", ["attempt", "timeline", "step", "table", "rank"])
def test_only_frames_of_one_step_and_different_ranks_merge(name):
    rows = [frame(0, [1.0]), frame(1, [1.0])]
    other = {"table": "u", "rank": 0}.get(name, 9)
    rows[1] = frame(**{"rank": 1, "values": [1.0], name: other})
    random.Random(0).shuffle(rows)
    for merging in (merge, combine):
        with pytest.raises(ValueError, match=r"twice|different"):
            merging(rows)
    with pytest.raises(ValueError, match="nothing"):
        merge([])
