"""A lab run learns, repeats bit for bit, rewinds, and goes wrong exactly where its scenario says."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from foreshock.lab.corpus import corpus
from foreshock.lab.data import ByteBatches
from foreshock.lab.scenarios import SCENARIOS, Training


def play(training, stop):
    start = training.batches.index
    pairs = [training.train_step(next(training.batches), step) for step in range(start, stop)]
    return torch.stack([torch.stack(p) for p in pairs])


def early(name, onset=3, length=2, seed=0):
    return Training(replace(SCENARIOS[name], onset=onset, length=length), seed, 1200)


def test_the_loss_falls_and_the_run_repeats_bit_for_bit():
    first, second = play(early("clean"), 60), play(early("clean"), 20)
    assert torch.equal(first[:20], second)
    assert float(torch.tensor(1e-42) * 1) > 0, "denormals are flushed outside the step"
    loss = first[:, 0]
    assert abs(float(loss[0]) - math.log(256)) < 0.1
    assert loss[-10:].mean() < loss[0] - 1.5


def test_a_fork_goes_on_alone_and_identically():
    training = early("clean")
    play(training, 3)
    fork = copy.deepcopy(training)
    assert all(a is b.attention.attend for a, b in zip(fork.kernels, fork.model.blocks, strict=True))
    assert torch.equal(play(fork, 6), play(training, 6))


@pytest.mark.parametrize(
    ("name", "first_seen"),
    [
        # a backward fault shows first in the gradient norm of its own step, its loss a step later
        ("up7", 3),
        ("up6", 3),
        ("up7-layer1", 3),
        ("stochastic5", 3),
        ("zero5", 3),
        ("output4", 3),
        ("corrupt", 3),
        ("shift", 3),
        # the rate is applied after the norm of its step is known
        ("lr10", 4),
        ("lr10-announced", 4),
    ],
)
def test_a_scenario_equals_the_clean_run_until_its_onset(name, first_seen):
    clean, other = play(early("clean"), 6), play(early(name), 6)
    differs = (clean != other).any(1).nonzero().flatten()
    assert int(differs[0]) == first_seen
    if SCENARIOS[name].fault:
        assert clean[3, 0] == other[3, 0]


def test_a_fault_hits_its_layers_only():
    everywhere, layer1 = early("up7"), early("up7-layer1")
    for training in (everywhere, layer1):
        play(training, 4)
    assert [k.fault is not None for k in everywhere.kernels] == [True, True]
    assert [k.fault is not None for k in layer1.kernels] == [False, True]


def test_data_controls_alter_exactly_their_steps():
    code, prose = corpus("code"), corpus("prose")
    plain = ByteBatches(code, seed=4, steps=20)
    corrupt = ByteBatches(code, seed=4, steps=20, corrupt=range(5, 8))
    shifted = ByteBatches(code, seed=4, steps=20, shift=(9, prose))

    def altered(batches):
        return [i for i in range(20) if not torch.equal(batches.at(i)[0], plain.at(i)[0])]

    assert altered(corrupt) == [5, 6, 7]
    assert altered(shifted) == list(range(9, 20))


def test_rate_controls_alter_exactly_their_steps():
    schedule = {n: Training(SCENARIOS[n], 0, 1200).schedule for n in ("clean", "lr10", "cosine")}
    clean, burst, cosine = ([schedule[n].factor(i) for i in range(1200)] for n in schedule)
    assert clean[0] == pytest.approx(0.01)
    assert set(clean[99:]) == {1.0}
    assert [i for i in range(1200) if burst[i] != clean[i]] == list(range(500, 550))
    assert burst[500] == 10.0
    assert cosine[-1] == pytest.approx(0.1, abs=1e-4)
    assert all(a > b for a, b in pairwise(cosine[99:]))


def test_batches_are_a_pure_function_of_seed_and_index():
    batches = ByteBatches(corpus("code"), seed=7, steps=10)
    seen = list(batches)
    assert len(seen) == len(batches) == 10
    batches.load_state_dict({"index": 4})
    again = list(batches)
    assert all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(seen[4:], again, strict=True)
    )
    assert not torch.equal(seen[0][0], ByteBatches(corpus("code"), seed=8, steps=10).at(0)[0])
    x, y = seen[0]
    assert x.dtype is y.dtype is torch.int64
    assert x.shape == y.shape == (8, 64)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_loading_a_state_rewinds_a_running_loop():
    batches = ByteBatches(corpus("code"), seed=1, steps=6)
    seen, saved = [], None
    for x, _ in batches:
        seen.append(x)
        if len(seen) == 2:
            saved = batches.state_dict()
        if len(seen) == 4:
            batches.load_state_dict(saved)
    assert len(seen) == 8
    assert torch.equal(seen[2], seen[4])


def test_windows_reach_the_last_byte_and_no_further():
    text = torch.arange(66, dtype=torch.uint8)
    starts = {int(ByteBatches(text, seed=0, steps=9).at(i)[0][j, 0]) for i in range(9) for j in range(8)}
    assert starts == {0, 1}


def test_the_schedule_survives_its_state():
    training = early("clean")
    play(training, 5)
    other = early("clean").schedule
    other.load_state_dict(training.schedule.state_dict())
    assert other.state_dict() == {"base_lrs": [2e-3], "last_step": 4}


def test_the_two_texts_are_long_and_different():
    code, prose = corpus("code"), corpus("prose")
    assert len(code) > 2_000_000
    assert len(prose) > 200_000
    shares = [torch.bincount(t.int(), minlength=256).double() / len(t) for t in (code, prose)]
    assert float((shares[0] - shares[1]).abs().sum()) > 0.2


def test_every_scenario_carries_its_own_name_and_expectation():
    assert {n: s.expects for n, s in SCENARIOS.items() if s.fault and s.expects != "none"} == dict.fromkeys(
        ("up7", "up6", "up7-layer1"), "attention"
    )
    assert all(name == s.name for name, s in SCENARIOS.items())
