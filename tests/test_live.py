"""Hands on a live model: states as files, recovery points, the data position, scaled rates."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.detectors.types import Diagnosis, Interval, Mechanism, Severity
from foreshock.remediation.commands import NOT_BUILT, Unavailable, resolve
from foreshock.remediation.live.actions import RateScale, Trainer
from foreshock.remediation.live.data import DataCursor, NotRewindable
from foreshock.remediation.live.recovery import PointBroken, RecoveryStore
from foreshock.remediation.live.state import NotStorable, flatten, rng_state, set_rng_state, unflatten
from foreshock.remediation.points import Point, PointLedger
from foreshock.remediation.verification import Criteria, Verification

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(plain)
def test_plain_state_survives_the_files(value):
    tensors = {}
    skeleton = json.loads(json.dumps(flatten(value, tensors)))
    assert unflatten(skeleton, tensors) == value


def test_optimizer_and_generators_survive_bit_for_bit():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tensors = {}
    skeleton = json.loads(json.dumps(flatten({"o": optimizer.state_dict(), "r": rng_state()}, tensors)))
    expected = (torch.rand(3), np.random.rand(), random.random())
    back = unflatten(skeleton, tensors)
    set_rng_state(back["r"])
    again = (torch.rand(3), np.random.rand(), random.random())
    assert torch.equal(expected[0], again[0])
    assert expected[1:] == again[1:]
    assert str(back["o"]) == str(optimizer.state_dict())


def test_what_needs_pickle_is_refused_with_its_place():
    with pytest.raises(NotStorable, match="/a/fn is a function"):
        flatten({"a": {"fn": lambda: 0}}, {})


@pytest.fixture
def store(tmp_path):
    saved = []
    made = RecoveryStore(tmp_path / "points", saved.append)
    made.saved = saved
    yield made
    made.close()


def test_a_point_is_whole_or_absent(store):
    store.save("p1", 0, 10, 10, {"w": torch.arange(4.0)}, wait=True)
    assert torch.equal(store.load("p1")["w"], torch.arange(4.0))
    assert [s.id for s in store.saved] == ["p1"]
    (store.directory / ".part-p2").mkdir()
    RecoveryStore(store.directory, store.saved.append).close()
    assert not (store.directory / ".part-p2").exists()


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "point.json"])
def test_a_damaged_point_is_found_before_it_is_used(store, file):
    store.save("p1", 0, 10, 10, {"w": torch.arange(4.0)}, wait=True)
    path = store.directory / "p1" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PointBroken):
        store.load("p1")
    path.unlink()
    with pytest.raises(PointBroken):
        store.load("p1")


def test_nothing_non_finite_is_ever_saved(store):
    store.save("p1", 0, 10, 10, {"w": torch.tensor([1.0, float("nan")])}, wait=True)
    assert store.saved[0].finite is False
    assert not (store.directory / "p1").exists()


def test_pruning_keeps_what_the_hub_has_not_heard_of(store):
    for name in ("p1", "p2", "p3"):
        store.save(name, 0, 10, 10, {"w": torch.ones(1)}, wait=True)
    store.prune({"p2"}, told={"p1"})
    store.prune({"p2"}, told={"p2"})
    assert sorted(p.name for p in store.directory.iterdir()) == ["p2", "p3"]


@pytest.mark.parametrize("kind", ["list", "shuffled"])
@settings(deadline=None, max_examples=20)
@given(at=st.integers(1, 25), drawn=st.integers(0, 12), skip=st.integers(0, 4))
def test_the_same_batches_come_again_after_a_rewind(kind, at, drawn, skip):
    def make():
        torch.manual_seed(3)
        if kind == "list":
            return [torch.tensor([i]) for i in range(9)]
        data = torch.utils.data.TensorDataset(torch.arange(9))
        return torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)

    def read(batches, n):
        return [int(next(batches)[0]) for _ in range(n)]

    plainly = read(iter(DataCursor(make(), None)), at + drawn + skip + 20)
    cursor = DataCursor(make(), None)
    batches = iter(cursor)
    read(batches, at)
    position, rng = cursor.position(), rng_state()
    read(batches, drawn)
    cursor.rewind(position, (at, at + skip) if skip else None)
    set_rng_state(rng)
    assert read(batches, 15) == plainly[at + skip : at + skip + 15]


def rewound(loader, at=5, drawn=7):
    cursor = DataCursor(loader, None)
    batches = iter(cursor)
    [next(batches) for _ in range(at)]
    position, rng = cursor.position(), rng_state()
    first = [str(next(batches)) for _ in range(drawn)]
    cursor.rewind(position)
    set_rng_state(rng)
    return first, [str(next(batches)) for _ in range(drawn)]


def test_a_samplers_own_generator_is_rewound_too():
    data = torch.utils.data.TensorDataset(torch.arange(40))
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(5))
    first, again = rewound(torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler))
    assert first == again


def test_a_loader_that_never_gives_the_same_batches_is_refused():
    class Restless:
        rng = np.random.default_rng(0)

        def __iter__(self):
            return iter(self.rng.permutation(20))

    with pytest.raises(NotRewindable):
        rewound(Restless())


def test_an_empty_loader_ends():
    assert list(DataCursor([], None)) == []


def test_a_position_can_be_held_and_put_back():
    cursor = DataCursor(list(range(10)), None)
    batches = iter(cursor)
    [next(batches) for _ in range(3)]
    position = cursor.position()
    [next(batches) for _ in range(2)]
    back = cursor.hold()
    cursor.rewind(position, (4, 6))
    back()
    assert [next(batches) for _ in range(3)] == [5, 6, 7]


def test_moments_kept_wider_than_their_parameter_come_back_wide():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["master"] = torch.tensor([1.0001, 2.0002])
    trainer = Trainer(torch.nn.ParameterList([weight]), optimizer)
    tensors = {}
    state = unflatten(flatten(trainer.capture(), tensors), tensors)
    optimizer.state[weight]["master"] = torch.zeros(2)
    trainer.restore(state)
    assert optimizer.state[weight]["master"].tolist() == pytest.approx([1.0001, 2.0002], abs=1e-7)


def test_paths_that_look_alike_do_not_collide():
    value = {
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        1: torch.tensor([2.0]),
        "1": torch.tensor([3.0]),
    }
    tensors = {}
    back = unflatten(flatten(value, tensors), tensors)
    assert [float(x) for x in (back["a/b"], back["a"]["b"], back[1], back["1"])] == [0.0, 1.0, 2.0, 3.0]


def test_a_one_shot_iterator_says_why_it_cannot_be_rewound():
    assert "one-shot" in DataCursor(iter([1, 2])).why_not


@pytest.mark.parametrize("named", [False, True])
def test_a_scaled_rate_scales_the_update_and_is_removable(named):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale = RateScale(optimizer, 0.25, [weight] if named else None)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [-0.25, -0.25]
    assert optimizer.param_groups[0]["lr"] == 1.0
    scale.remove()
    optimizer.step()
    assert weight.tolist() == [-1.25, -1.25]


# -- the pure parts ----------------------------------------------------------------------------------------


def diagnosis(mechanism=Mechanism.ATTENTION, early=500, layers=(1,)):
    return Diagnosis(mechanism, 510, Severity.CRITICAL, Interval(early, 510), layers, (), (), "confirmed", ())


def ledger(*steps, finite=True):
    made = PointLedger()
    for step in steps:
        made.add(Point(f"s{step}", step, step, step, finite))
    return made


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2000), max_size=30), st.integers(0, 2000), st.integers(0, 2500), st.sampled_from(["attention", "data"]),
       st.dictionaries(st.sampled_from(["attention", "data"]), st.integers(0, 2000), max_size=2))  # fmt: skip
def test_no_rollback_ever_lands_on_a_poisoned_point(steps, onset, now, mechanism, firing):
    made = ledger(*sorted(steps))
    made.firing(firing)
    chosen = made.choose(onset, now, frozenset({mechanism}))
    if chosen is not None:
        assert chosen.step <= onset
        assert all(chosen.step <= early for early in firing.values())
        assert mechanism == "attention" or now >= chosen.step + 450
    made.firing({})
    later = made.choose(onset, now + 1000, frozenset({mechanism}))
    assert later is None or all(later.step <= early for early in firing.values())
    assert ledger(*sorted(steps), finite=False).choose(onset, now, frozenset({mechanism})) is None


def test_the_ledger_keeps_one_older_point_and_pinned_ones():
    made = ledger(*range(0, 2001, 50))
    made.pinned = {"s100"}
    kept = [p.step for p in made.keep(2000)]
    assert kept[:2] == [100, 1350]
    assert kept[2] == 1400
    assert kept[-1] == 2000


def test_actions_of_later_issues_say_that_they_are_unavailable():
    for name, reason in NOT_BUILT.items():
        with pytest.raises(Unavailable, match=reason.split()[0]):
            resolve(name, {}, diagnosis(), ledger(), 600, {})


def test_words_become_facts():
    made = ledger(450, 500, 550)
    assert resolve("rollback", {"skip_data": "window"}, diagnosis(), made, 600, {}) == {
        "point": "s500",
        "step": 500,
        "skip": [500, 600],
    }
    assert resolve(
        "precision_upcast", {"target": "affected", "dtype": "float32"}, diagnosis(), made, 600, {}
    ) == {"layers": [1], "how": "float32"}
    assert (
        resolve("precision_upcast", {"target": "all", "dtype": "float32"}, diagnosis(), made, 600, {})[
            "layers"
        ]
        is None
    )
    with pytest.raises(Unavailable, match="no recovery point at or before step 400"):
        resolve("rollback", {"skip_data": "none"}, diagnosis(early=400), made, 600, {})


CRITERIA = Criteria(initial_delay=16, interval=8, band=3.0, recovered=3, failed=3, failed_of=5, timeout=200)


def judge(values):
    made = Verification("c", "i", CRITERIA, {"a": (1.0, 0.5)}, started=100, applied_step=100)
    for clock, value in enumerate(values, start=101):
        verdict = made.update(clock, {"a": (value, 0.0)})
        if verdict:
            return verdict[0], clock
    return None


def test_verification_waits_then_counts():
    assert judge([1.0] * 300) == ("recovered", 132)
    assert judge([9.0] * 300) == ("failed", 132)
    assert judge([float("nan")] * 300) == ("inconclusive", 300)
    assert judge([1.0 if c % 16 else 9.0 for c in range(300)]) is not None


@pytest.mark.parametrize("phase", range(4))
def test_a_signal_measured_every_fourth_step_is_judged_whenever_the_command_was_applied(phase):
    values = [1.0 if clock % 4 == phase else float("nan") for clock in range(101, 400)]
    verdict, clock = judge(values)
    assert verdict == "recovered"
    assert clock <= 132 + 3
