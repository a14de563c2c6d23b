"""The watch on a real small training: it changes nothing, it heals, it rewinds exactly, and it never gets in the way."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import foreshock
from foreshock.lab.flash import KernelFault
from foreshock.pipeline.events import Audit
from foreshock.pipeline.replay import fold, replay
from foreshock.pipeline.signal_files import read
from foreshock.pipeline.store import RunStore

ROLLBACK = """
apiVersion: foreshock/v1
name: test
mode: enforce
group_wait: 0 steps
policies:
  - name: attention
    match: {mechanism: attention}
    ladder: [{do: [{rollback: {}}]}]
"""
UP6 = KernelFault("delta", 6, "up", gain=3.0)


def train(small, steps, directory=None, fault_at=None, cure_at_rewind=True, on_step=None, **options):
    """Losses by step of a run, watched in `directory` or not at all, and the training itself."""
    losses, weights = {}, {}
    if directory is None:
        for step, batch in enumerate(forever(small)):
            if step >= steps:
                break
            losses[step] = float(small.train_step(batch))
        return losses, weights
    step, rewound = 0, False
    options = {"policy": "unattended", "allow": "enforce", "sync": True, "start": 20, **options}
    state = options.pop("state", None)
    with foreshock.watch(small.model, small.optimizer, state, run_dir=directory, run="r", **options) as watch:
        for batch in watch.batches(small.loader, epochs=small.epochs):
            if fault_at is not None and step >= fault_at and not rewound:
                small.break_attention(UP6)
            losses[step] = float(small.train_step(batch))
            if on_step is not None:
                on_step(watch, step)
            verdict = watch.step(losses[step])
            rewound |= verdict.rewound
            if verdict.rewound and cure_at_rewind:
                small.break_attention(None)
            step = verdict.step
            if verdict.stop or step >= steps:
                break
    return losses, weights


def forever(small):
    while True:
        yield from small.loader


def audit(directory, kind=None):
    with RunStore.open_readonly(directory) as store:
        return [r for r in store.audit() if kind in (None, r.kind)]


@pytest.mark.parametrize(("sync", "loader"), [(True, "bytes"), (False, "bytes"), (True, "shuffled")])
def test_watched_and_unwatched_runs_are_identical_bit_for_bit(small, tmp_path, sync, loader):
    """A shuffled DataLoader draws from the generator that the dropout draws from too."""
    bare = small(loader=loader, dropout=0.1)
    losses, _ = train(bare, 60)
    watched = small(loader=loader, dropout=0.1)
    seen, _ = train(watched, 60, tmp_path, allow="observe", sync=sync)
    assert seen == losses
    for a, b in zip(bare.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_after_close_nothing_is_left_on_the_model(small, tmp_path):
    training = small()
    attend = [vars(b.attention).get("attend") for b in training.model.blocks]
    train(training, 5, tmp_path)
    assert [vars(b.attention).get("attend") for b in training.model.blocks] == attend
    assert not training.optimizer._optimizer_step_pre_hooks
    assert not training.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("loader", ["bytes", "dataloader"])
def test_a_rollback_is_bit_exact(small, tmp_path, policy_file, loader):
    """After the rewind everything equals the run that never fell ill: losses, weights, data, RNG, signals."""
    healthy = small(loader=loader, dropout=0.1)
    expected, _ = train(healthy, 90, tmp_path / "healthy", policy=policy_file(ROLLBACK), points_every=10)
    ill = small(loader=loader, dropout=0.1)
    found, _ = train(ill, 90, tmp_path / "ill", fault_at=52, policy=policy_file(ROLLBACK), points_every=10)
    applied = audit(tmp_path / "ill", "command.applied")
    assert len(applied) == 1
    to = applied[0].payload["acks"]["0"]["rollback"]["to"]
    assert to < 52 < applied[0].payload["step"]
    assert found == expected
    for a, b in zip(healthy.model.parameters(), ill.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(healthy.optimizer.state.values(), ill.optimizer.state.values(), strict=True):
        assert all(torch.equal(p[k], q[k]) for k in p)
    assert signals(tmp_path / "ill", from_step=to) == signals(tmp_path / "healthy", from_step=to)


def signals(directory, from_step):
    """The last value of every signal at every step from `from_step` on, as bytes."""
    table = read(directory).to_pydict()
    names = [n for n in table if n not in ("run", "attempt", "rank", "seq", "timeline", "step")]
    rows = {}
    for i, step in enumerate(table["step"]):
        if step >= from_step:
            rows[step] = np.array([table[n][i] for n in names], dtype=np.float32).tobytes()
    return rows


def test_skip_data_passes_over_the_window(small, tmp_path, policy_file):
    policy = policy_file(ROLLBACK.replace("rollback: {}", "rollback: {skip_data: window}"))
    training = small()
    train(training, 90, tmp_path, fault_at=52, policy=policy, points_every=10)
    applied = audit(tmp_path, "command.applied")[0].payload
    first, last = applied["acks"]["0"]["rollback"]["skipped"]
    assert last == applied["step"]
    assert training.loader.index == 90 + (last - first)


def test_skip_data_alone_moves_on_by_as_many_batches_as_the_window_had(small, tmp_path, policy_file):
    training = small()
    train(
        training,
        60,
        tmp_path,
        fault_at=30,
        policy=policy_file(ROLLBACK.replace("rollback: {}", "skip_data: {}")),
    )
    applied = audit(tmp_path, "command.applied")[0].payload
    count = applied["acks"]["0"]["skip_data"]["batches"]
    assert count == applied["step"] - audit(tmp_path, "diagnosis")[0].payload["onset"][0]
    assert training.loader.index == 60 + count


def test_manual_data_makes_rollback_unavailable_and_says_so_at_attach(small, tmp_path, caplog):
    training = small()
    with (
        caplog.at_level(logging.WARNING, "foreshock"),
        foreshock.watch(
            training.model, training.optimizer, run_dir=tmp_path, data="manual", allow="enforce", sync=True
        ) as watch,
    ):
        assert "rollback and skip_data are unavailable" in caplog.text
        with pytest.raises(ValueError, match="owns its iterator"):
            next(watch.batches(training.loader))
        for batch, _ in zip(training.loader, range(3), strict=False):
            watch.step(training.train_step(batch))
    started = audit(tmp_path, "attempt.started")[0].payload
    assert set(started["unavailable"]) >= {"rollback", "skip_data"}


def test_pause_saves_and_stops(small, tmp_path, policy_file):
    policy = policy_file(ROLLBACK.replace("rollback: {}", "pause: {}"))
    losses, _ = train(small(), 200, tmp_path, fault_at=30, policy=policy, points_every=50)
    assert max(losses) < 60
    stopped = audit(tmp_path, "command.applied")[0].payload["step"]
    assert (tmp_path / "points" / f"pause-a1-t0-s{stopped:08d}" / "point.json").exists()


def test_lr_scale_slows_the_model_and_leaves_the_users_rate_alone(small, tmp_path, policy_file):
    policy = policy_file(
        ROLLBACK.replace("{mechanism: attention}", "{mechanism: [attention, optimizer, unknown]}").replace(
            "rollback: {}", "lr_scale: {target: model, factor: 0.5}"
        )
    )
    inside = []
    training = small()
    train(
        training,
        60,
        tmp_path,
        fault_at=30,
        policy=policy,
        on_step=lambda *_: inside.append(training.optimizer.param_groups[0]["lr"]),
    )
    assert audit(tmp_path, "command.applied")[0].payload["acks"]["0"]["lr_scale"]["factor"] == 0.5
    assert set(inside) == {2e-3}


def test_the_upcast_cures_and_is_reapplied_by_the_next_attempt(small, tmp_path):
    train(small(), 60, tmp_path, fault_at=30)
    training = small()
    with foreshock.watch(
        training.model, training.optimizer, run_dir=tmp_path, allow="enforce", policy="unattended", sync=True
    ) as watch:
        for batch in watch.batches(training.loader):
            upcasted = dict(watch._trainer.interceptor.upcasted)
            watch.step(training.train_step(batch))
            break
    first = audit(tmp_path, "attempt.started")[-1].payload
    assert first["attempt"] == 2
    assert first["standing"] == [{"precision_upcast": {"layers": [0, 1], "how": "float32"}}]
    assert upcasted == {0: "float32", 1: "float32"}
    third = small()
    with foreshock.watch(third.model, third.optimizer, run_dir=tmp_path, allow="observe", sync=True) as watch:
        assert watch._trainer.interceptor.upcasted == {}
        assert any("standing precision_upcast" in limit for limit in watch.limits)


def test_replay_of_a_real_run_gives_the_same_records(small, tmp_path):
    train(small(), 60, tmp_path, fault_at=30)
    with RunStore.open_readonly(tmp_path) as store:
        result = replay(store)
        assert result.difference is None
        assert result.records == len(list(store.audit())) > 5
        effects = [e for _, _, effects, _ in fold(store) for e in effects]
    assert sum(isinstance(e, Audit) for e in effects) == result.records


def test_microsteps_are_averaged(small, tmp_path):
    training = small()
    with foreshock.watch(training.model, training.optimizer, run_dir=tmp_path, sync=True) as watch:
        for batch in watch.batches(training.loader):
            loss = training.train_step(batch)
            watch.microstep(loss)
            watch.microstep(loss + 1.0)
            watch.step()
            break
    assert read(tmp_path)["symptom.loss"].to_pylist()[0] == pytest.approx(float(loss) + 0.5, rel=1e-5)


class Stubborn:
    """A scheduler whose state cannot be loaded."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise RuntimeError("not today")


def test_a_rollback_that_cannot_be_completed_changes_nothing_and_is_on_record(small, tmp_path, policy_file):
    training = small(dropout=0.1)
    policy = policy_file(ROLLBACK)
    found, _ = train(
        training,
        70,
        tmp_path / "a",
        fault_at=32,
        policy=policy,
        points_every=10,
        state={"scheduler": Stubborn()},
    )
    twin = small(dropout=0.1)
    expected, _ = train(twin, 70, tmp_path / "b", fault_at=32, allow="observe")
    assert found == expected
    assert audit(tmp_path / "a", "command.applied") == []
    outcome = audit(tmp_path / "a", "outcome")[0].payload
    assert (outcome["verdict"], "not today" in outcome["reason"]) == ("failed", True)


def test_a_broken_point_is_passed_over_for_an_older_one(small, tmp_path, policy_file):
    def damage(watch, step):
        if step == 35:
            newest = tmp_path / "points" / "a1-t0-s00000015"
            (newest / "tensors.safetensors").write_bytes(b"gone")

    train(small(), 70, tmp_path, fault_at=32, policy=policy_file(ROLLBACK), points_every=5, on_step=damage)
    verdicts = [r.payload["verdict"] for r in audit(tmp_path, "outcome")]
    issued = [r.payload["actions"][0]["rollback"]["step"] for r in audit(tmp_path, "command.issued")]
    assert verdicts[0] == "point broken"
    assert issued == [15, 10]
    assert audit(tmp_path, "command.applied")[0].payload["acks"]["0"]["rollback"]["to"] == 10


def test_a_rollback_does_not_cross_into_an_earlier_loop(small, tmp_path, policy_file, caplog):
    training = small(steps=1000)
    step = 0
    with foreshock.watch(
        training.model, training.optimizer, run_dir=tmp_path, allow="enforce", policy=policy_file(ROLLBACK), sync=True,
        start=20, points_every=10,
    ) as watch:  # fmt: skip
        for _ in range(2):
            for batch in watch.batches(training.loader):
                training.break_attention(UP6 if step >= 32 else None)
                step = watch.step(training.train_step(batch)).step
                if step % 30 == 0:
                    break
    assert "cannot cross" in caplog.text
    assert "earlier watch.batches()" in audit(tmp_path, "outcome")[0].payload["reason"]


def test_a_mask_of_infinities_does_not_forbid_recovery_points(small, tmp_path):
    training = small()
    training.model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    train(training, 21, tmp_path, points_every=10)
    assert len(list((tmp_path / "points").iterdir())) == 2


def test_one_directory_has_one_decider(small, tmp_path, caplog):
    first, second = small(), small()
    with (
        foreshock.watch(first.model, first.optimizer, run_dir=tmp_path, allow="enforce", sync=True) as a,
        foreshock.watch(second.model, second.optimizer, run_dir=tmp_path, allow="enforce", sync=True) as b,
    ):
        for batch, _ in zip(a.batches(first.loader), range(3), strict=False):
            a.step(first.train_step(batch))
            b.step(second.train_step(batch))
    assert "another watch is running" in caplog.text
    with RunStore.open_readonly(tmp_path) as store:
        assert store.verify().ok
        assert replay(store).difference is None


def test_a_run_can_be_taken_up_after_a_bad_policy_or_a_strange_announcement(
    small, tmp_path, policy_file, caplog
):
    train(
        small(), 5, tmp_path / "run", policy=policy_file("apiVersion: foreshock/v1\nname: x\nmoed: enforce\n")
    )
    train(small(), 5, tmp_path / "run", on_step=lambda w, _: w.expect(object(), steps=np.int64(-3)))
    caplog.clear()
    train(small(), 5, tmp_path / "run")
    assert status_of(tmp_path / "run")["failure"] is None
    with RunStore.open_readonly(tmp_path / "run") as store:
        assert replay(store).difference is None
        assert len([r for r in store.audit() if r.kind == "announcement"]) == 5


# -- training may not fail ---------------------------------------------------------------------------------


def test_a_probe_that_raises_is_given_up_and_training_goes_on(small, tmp_path, caplog):
    training = small()

    def sabotage(watch, step):
        if step == 10:
            probe = next(p for p in watch._probes if p.name == "update_spectrum")
            probe.collect = lambda step: 1 / 0

    losses, _ = train(training, 40, tmp_path, on_step=sabotage)
    assert len(losses) == 40
    status = status_of(tmp_path)
    assert any("update_spectrum" in limit for limit in status["limits"])
    assert "given up" in caplog.text


def test_a_hub_that_raises_stops_watching_not_training(small, tmp_path, caplog, monkeypatch):
    from foreshock.pipeline.hub import Hub

    monkeypatch.setattr(Hub, "_closed", lambda self, closed: 1 / 0)
    losses, _ = train(small(), 30, tmp_path, fault_at=10)
    assert len(losses) == 30
    assert "NOT WATCHING" in caplog.text
    assert "ZeroDivisionError" in status_of(tmp_path)["failure"]


def test_a_disk_that_fails_in_the_middle_issues_no_command(small, tmp_path, caplog, monkeypatch):
    from foreshock.pipeline.store import StoreError

    def full(*args, **kwargs):
        raise StoreError("database or disk is full")

    def fill(watch, step):
        if step == 20:
            monkeypatch.setattr(RunStore, "append_event", full)

    training = small()
    losses, _ = train(training, 60, tmp_path, fault_at=30, on_step=fill)
    monkeypatch.undo()
    assert len(losses) == 60
    assert "NOT ACTING" in caplog.text
    assert "UNAUDITED" in caplog.text
    assert audit(tmp_path, "command.issued") == []
    assert all(kernel.fault is not None for kernel in training.kernels)


def test_a_directory_that_cannot_be_made_is_not_watched_and_harmless(small, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    losses, _ = train(small(), 10, tmp_path / "file" / "run")
    assert len(losses) == 10
    assert "NOT ACTING" in caplog.text


def test_a_bad_policy_is_told_with_its_place_and_harmless(small, tmp_path, caplog, policy_file):
    losses, _ = train(
        small(),
        10,
        tmp_path / "run",
        policy=policy_file("apiVersion: foreshock/v1\nname: x\nmoed: enforce\n"),
    )
    assert len(losses) == 10
    assert "policy.yaml:3" in caplog.text


def test_only_wrong_arguments_raise(small, tmp_path):
    training = small()
    with pytest.raises(ValueError, match="observe, dry_run, enforce"):
        foreshock.watch(training.model, training.optimizer, allow="yes")
    with pytest.raises(TypeError, match="alow"):
        foreshock.watch(training.model, training.optimizer, alow="observe")
    with pytest.raises(TypeError, match="scheduler"):
        foreshock.watch(training.model, training.optimizer, {"scheduler": object()})
    with pytest.raises(ValueError, match="manual"):
        foreshock.watch(training.model, training.optimizer, data="mine")


def test_switched_off_it_is_not_there(small, tmp_path, monkeypatch):
    monkeypatch.setenv("FORESHOCK", "off")
    losses, _ = train(small(), 5, tmp_path / "run")
    assert len(losses) == 5
    assert not (tmp_path / "run").exists()


def test_an_unknown_model_is_watched_by_its_symptoms_alone(tmp_path, caplog):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreshock.watch(model, optimizer, run_dir=tmp_path, sync=True) as watch:
        for _ in watch.batches([0, 1, 2]):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    assert "attention is not watched" in caplog.text
    assert "sites=" in caplog.text
    assert len(read(tmp_path)) == 3


def status_of(directory):
    from foreshock.cli.runs import read_status

    return read_status(directory)


def test_bf16_weights_say_that_their_spectrum_needs_float32_masters(small, tmp_path):
    training = small()
    training.model.bfloat16()
    with foreshock.watch(training.model, training.optimizer, run_dir=tmp_path / "a", sync=True) as watch:
        assert any("masters=" in limit for limit in watch.limits)
    masters = {p: p.detach().float() for p in training.model.parameters()}
    with foreshock.watch(
        training.model, training.optimizer, run_dir=tmp_path / "b", sync=True, masters=masters
    ) as watch:
        assert watch.limits == []
