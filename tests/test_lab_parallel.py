"""A data-parallel lab run is the one-process training, rank for rank, and is healed on all ranks at one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import distributed, multiprocessing
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.lab.corpus import corpus
from foreshock.lab.data import ByteBatches
from foreshock.lab.parallel import experiment
from foreshock.lab.scenarios import SCENARIOS, Training

STEPS = 12


def steps_of(training):
    """Losses, gradients and dithers of its first steps, and the weights after them."""
    rows = []
    for step in range(STEPS):
        loss, _ = training.train_step(next(training.batches), step)
        grad = torch.cat([p.grad.flatten() for p in training.model.parameters()])
        rows.append((loss, grad, torch.tensor([kernel.dither for kernel in training.kernels])))
    losses, grads, dithers = (torch.stack(column) for column in zip(*rows, strict=True))
    weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    return {"losses": losses, "grads": grads, "dithers": dithers, "weights": weights}


def one_rank(rank, world, directory):
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    training = Training(replace(SCENARIOS["up7"], onset=3), 7, 1200, rank, world)
    torch.save(steps_of(training), f"{directory}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path):
    multiprocessing.spawn(one_rank, (2, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = steps_of(Training(replace(SCENARIOS["up7"], onset=3), 7, 1200))
    for name in ("weights", "grads"):
        assert torch.equal(first[name], second[name])
    mean = (first["losses"] + second["losses"]) / 2
    assert (mean - alone["losses"]).abs().max() < 2e-5
    distance = (first["grads"] - alone["grads"]).norm(dim=1) / alone["grads"].norm(dim=1)
    assert distance[0] < 1e-6
    assert distance.max() < 1e-3, "bf16 turns the order of sums into single roundings"
    for name in ("losses", "dithers"):
        assert not (first[name] == second[name]).any(), "sequences and dice are each rank's own"


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_shares_make_up_the_batch(world):
    def batches(part):
        return ByteBatches(corpus("code"), seed=3, steps=9, corrupt=range(4, 6), part=part)

    for index in (0, 4):
        shares = [batches((rank, world)).at(index) for rank in range(world)]
        for whole, parts in zip(batches((0, 1)).at(index), zip(*shares, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 2), (-1, 2), (0, 8), (0, 0)])
def test_a_batch_of_8_is_shared_by_two_or_four_only(rank, world):
    with pytest.raises(ValueError, match="1, 2 or 4 ranks"):
        Training(SCENARIOS["clean"], 0, 10, rank, world)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")  # Ray Data's own, on every fit
def test_an_experiment_on_ray_train_is_treated_on_all_ranks_at_one_step(tmp_path):
    told = []
    facts, runs = experiment(
        "up7", 7, 200, tmp_path, 2, lambda *words: told.append(words), onset=100, start=40, points_every=100
    )
    assert (facts["workers"], facts["audit_verified"]) == (2, True)
    assert (facts["diagnosis"], facts["layers"]) == ("attention", [0, 1])
    assert 100 < facts["diagnosis_step"] <= 120
    applied = runs["protected"].first("command.applied")
    assert {ack["step"] for ack in applied["acks"].values()} == {facts["applied_step"]}
    assert sorted(applied["acks"]) == ["0", "1"]
    assert facts["action"] == ["precision_upcast"]
    assert facts["actions_in_clean"] == 0
    assert runs["unprotected"].first("command.issued") is None
    for run in runs.values():
        assert list(run.losses) == list(range(200))
        assert [run.losses[s] for s in range(101)] == [runs["clean"].losses[s] for s in range(101)]
    assert {(run, end) for run, _, end, _ in told} == {(run, 200) for run in runs}


@pytest.mark.slow
def test_a_demo_without_ray_says_what_runs_instead(tmp_path, monkeypatch):
    import ray

    def refuse(**_):
        raise PermissionError("no writable HOME")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by another test in this process
    monkeypatch.setattr(ray, "init", refuse)
    result = CliRunner().invoke(app, ["demo", "attention", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "Ray did not start: PermissionError: no writable HOME" in result.stderr
    assert "--local" in result.stderr


def test_a_demo_takes_two_or_four_workers(tmp_path):
    result = CliRunner().invoke(app, ["demo", "attention", "--out", str(tmp_path), "--workers", "3"])
    assert result.exit_code == 2
