"""What directed rounding promises, over all of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.lab.rounding import to_bits

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8)
keeps = st.integers(0, 23)
directions = st.sampled_from(["up", "down", "zero", "away", "stochastic"])


def mantissa(x: torch.Tensor, keep: int) -> torch.Tensor:
    """The mantissa bits below the `keep` that should be left."""
    return x.view(torch.int32) & ((1 << (23 - keep)) - 1)


@settings(deadline=None, max_examples=80)
@given(floats, keeps, directions)
def test_result_is_representable_and_idempotent(values, keep, direction):
    once = to_bits(torch.tensor(values), keep, direction)
    assert (mantissa(once, keep) == 0).all()
    assert torch.equal(to_bits(once, keep, direction), once)


@settings(deadline=None, max_examples=80)
@given(floats, keeps)
def test_directions_are_ordered_around_the_value(values, keep):
    x = torch.tensor(values)
    down, up, zero, away = (to_bits(x, keep, d) for d in ("down", "up", "zero", "away"))
    assert (down <= x).all()
    assert (x <= up).all()
    assert (zero.abs() <= x.abs()).all()
    assert (x.abs() <= away.abs()).all()
    exact = mantissa(x, keep) == 0
    assert torch.equal(down == up, exact)
    chance = to_bits(x, keep, "stochastic")
    assert ((chance == down) | (chance == up)).all()


@settings(deadline=None, max_examples=40)
@given(floats, keeps)
def test_down_is_the_mirror_of_up(values, keep):
    x = torch.tensor(values)
    assert torch.equal(to_bits(x, keep, "down"), -to_bits(-x, keep, "up"))


@pytest.mark.parametrize("value", [1.0 + 1 / 3, -1.7, 3.3e-5, -2.3e7])
def test_stochastic_rounding_is_unbiased_and_the_others_are_not(value):
    x = torch.full((200_000,), value)
    ulp = float(to_bits(x[:1], 5, "up") - to_bits(x[:1], 5, "down"))

    def bias(direction):
        rounded = to_bits(x, 5, direction, torch.Generator().manual_seed(3)).double()
        return float((rounded - x.double()).mean()) / ulp

    assert abs(bias("stochastic")) < 5 * 0.5 / np.sqrt(200_000)
    assert bias("up") > 0.05
    assert bias("down") < -0.05


def test_stochastic_rounding_repeats_with_its_generator():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    a, b, c = (to_bits(x, 4, "stochastic", torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_infinities_and_nan_stay_and_the_largest_overflows():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max])
    for direction in ("up", "down", "zero", "away", "stochastic"):
        assert torch.equal(to_bits(x, 7, direction)[:2], x[:2])
        assert to_bits(x, 7, direction)[2].isnan()
    assert to_bits(x, 7, "up")[3] == torch.inf


def test_bf16_neighbours_bracket_torch_rounding():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    nearest = x.bfloat16().float()
    assert ((nearest == to_bits(x, 7, "up")) | (nearest == to_bits(x, 7, "down"))).all()


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="float64"):
        to_bits(torch.zeros(1, dtype=torch.float64), 7, "up")
    with pytest.raises(ValueError, match="24"):
        to_bits(torch.zeros(1), 24, "up")
    with pytest.raises(ValueError, match="sideways"):
        to_bits(torch.zeros(1), 7, "sideways")
