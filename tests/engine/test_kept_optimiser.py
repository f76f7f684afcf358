"""Optimisers that clients keep from round to round (--optimizer-state=kept)."""

import json
import shutil

import jax
import numpy as np
import pytest
import toy

from fedjax_pcdd import models
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.jobs import resumed
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import OPTIMISER
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local

ORDERED = {"shuffle": False}  # every epoch has the same batches, so that two short rounds are one long one


def solo(epochs, *, optimizer="sgd", lanes=1, **options):
    parts, method = toy.federation(), METHODS["solo"]()
    local = Local(epochs, 8, "keep", optimizer, 0.01, 0.9, 1e-4, None, **ORDERED)
    model = method.build(models.build("mlp", num_classes=toy.CLASSES, image_shape=(5, 5, 1)))
    return Simulation(
        model, [Experiment(parts, method, local, 0)], pipeline=toy.PLAIN, cohort=5, rounds=3,
        **toy.options(lanes=lanes, **options),
    )  # fmt: skip


def arrays(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def differ(one, other):
    return max(np.abs(a - b).max() for a, b in zip(arrays(one), arrays(other), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "lanes"), [("sgd", 1), ("adam", 2)])
def test_two_rounds_of_one_epoch_are_one_of_two(optimizer, lanes):
    """Nobody averages under SOLO, so only the optimiser's state could tell them apart."""
    expected, _ = toy.train(solo(2, optimizer=optimizer), (0,))
    kept, _ = toy.train(solo(1, optimizer=optimizer, lanes=lanes, keeps_optimiser=True), (0, 1))
    fresh, _ = toy.train(solo(1, optimizer=optimizer), (0, 1))
    assert differ(kept.clients, expected.clients) < 1e-6
    assert differ(fresh.clients, expected.clients) > 1e-4


@pytest.mark.thorough
def test_it_lives_where_the_clients_live():
    on_host, _ = toy.train(solo(1, keeps_optimiser=True, client_state="host"), (0, 1))
    on_device, _ = toy.train(solo(1, keeps_optimiser=True), (0, 1))
    assert isinstance(jax.tree.leaves(on_host.statistics)[0], np.ndarray)
    assert differ(on_host, on_device) < 1e-6


def test_parts_that_a_method_does_not_resume_begin_anew():
    tree = {"private": {"w": 1.0}, "meme": {"w": 2.0}}
    old = ({"private": {"w": 3.0}, "meme": {"w": 4.0}},)
    assert resumed((tree,), old, ("private",)) == ({"private": {"w": 3.0}, "meme": {"w": 2.0}},)
    assert resumed((tree,), old, None) == old
    assert METHODS["fml"]().traits().resumed == ("private",)


@pytest.mark.thorough
def test_participants_keep_theirs_but_for_the_meme():
    method = METHODS["fml"](meme="mlp")
    public = Public(toy.public_images(), toy.PLAIN, 8)
    table = Groups(
        toy.architectures(0, 0, 0, 0, 0), toy.federation(), method, Local(1, 8, "keep"), seed=0, public=public,
        pipeline=toy.PLAIN, rounds=3, keeps_optimiser=True,
    )  # fmt: skip
    state, _ = table.step(table.start(), 0)
    (kept,) = state.statistics
    momentum = [tree for tree in jax.tree.leaves(kept[OPTIMISER], is_leaf=lambda x: isinstance(x, dict)) if tree]
    assert set(momentum[0]) == {"private", "meme"}
    assert all(np.abs(x).max() > 0 for x in arrays(momentum[0]["private"]))


@pytest.mark.thorough
def test_a_run_keeps_them_and_can_beresumed(tmp_path):
    common = ["--method=fedavg", "--rounds=2", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--quiet"]
    results = {}
    for name in ("fresh", "kept"):
        folder = tmp_path / name
        assert main([*common, f"--optimizer-state={name}", f"--run-dir={folder}"]) == 0
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        results[name] = [json.loads(line)["loss"] for line in lines]
    assert results["fresh"][0] == results["kept"][0]
    assert results["fresh"][1] != results["kept"][1]
    shutil.rmtree(tmp_path / "kept" / "checkpoints" / "2")
    assert main([f"--resume={tmp_path / 'kept'}", "--quiet"]) == 0
    last = (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()[1]
    assert json.loads(last)["loss"] == results["kept"][1]
