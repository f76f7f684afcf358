"""Optimiser state that clients keep between rounds (--optimizer-state=kept)."""

import json
import shutil

import jax
import numpy as np
import pytest
import toy
from participants import largest_difference

from fedjax_pcdd import models
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.engine.groups import Groups, Public
from fedjax_pcdd.engine.jobs import resumed
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import OPTIMISER
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.testing import leaves

ORDERED = {"shuffle": False}  # every epoch has the same batches, so two rounds of one epoch equal one of two


def simulation(method, local, *, lanes=1, **options):
    model = method.build(models.build("mlp", num_classes=toy.CLASSES, image_shape=(5, 5, 1)))
    return Simulation(
        model, [Experiment(toy.federation(), method, local, 0)], pipeline=toy.PLAIN, cohort=5, rounds=3,
        **toy.options(lanes=lanes, **options),
    )  # fmt: skip


def solo(epochs, *, optimizer="sgd", **options):
    local = Local(epochs, 8, "keep", optimizer, 0.01, 0.9, 1e-4, None, **ORDERED)
    return simulation(METHODS["solo"](), local, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "lanes"), [("sgd", 1), ("adam", 2)])
def test_two_rounds_of_one_epoch_equal_one_round_of_two(optimizer, lanes):
    """SOLO averages nothing, so only the optimiser's state can make the results differ."""
    expected, _ = toy.train(solo(2, optimizer=optimizer), (0,))
    kept, _ = toy.train(solo(1, optimizer=optimizer, lanes=lanes, keeps_optimiser=True), (0, 1))
    fresh, _ = toy.train(solo(1, optimizer=optimizer), (0, 1))
    assert largest_difference(kept.clients, expected.clients) < 1e-6
    assert largest_difference(fresh.clients, expected.clients) > 1e-4


@pytest.mark.thorough
def test_optimiser_state_is_stored_where_client_state_is():
    on_host, _ = toy.train(solo(1, keeps_optimiser=True, client_state="host"), (0, 1))
    on_device, _ = toy.train(solo(1, keeps_optimiser=True), (0, 1))
    assert isinstance(jax.tree.leaves(on_host.statistics)[0], np.ndarray)
    assert largest_difference(on_host, on_device) < 1e-6


@pytest.mark.parametrize("name", ["fedcm", "mofedsam", "feddc", "scaffold"])
@pytest.mark.parametrize(("momentum", "keeps", "advised"), [(0.9, True, 1), (0.0, True, 0), (0.9, False, 0)])
def test_methods_that_divide_by_effective_steps_advise_against_kept_momentum(name, momentum, keeps, advised):
    method, local = METHODS[name](), Local(1, 8, "keep", momentum=momentum, clip=10.0)
    (advice,) = simulation(method, local, keeps_optimiser=keeps).advice
    assert sum("`optimizer_state=kept` takes momentum of earlier" in sentence for sentence in advice) == advised


@pytest.mark.thorough
def test_kept_momentum_lets_the_direction_of_fedcm_grow():
    norms = {}
    for keeps in (False, True):
        local = Local(3, 8, "top_up", lr=0.005, momentum=0.9)
        state, _ = toy.train(simulation(METHODS["fedcm"](), local, keeps_optimiser=keeps), tuple(range(20)))
        norms[keeps] = np.sqrt(sum(np.square(x).sum() for x in leaves(state.servers.direction)))
    assert norms[False] < 1
    assert norms[True] > 100


def test_parts_that_a_method_does_not_resume_are_reset():
    fresh = {"private": {"w": 1.0}, "meme": {"w": 2.0}}
    kept = ({"private": {"w": 3.0}, "meme": {"w": 4.0}},)
    assert resumed((fresh,), kept, ("private",)) == ({"private": {"w": 3.0}, "meme": {"w": 2.0}},)
    assert resumed((fresh,), kept, None) == kept
    assert METHODS["fml"]().traits().resumed == ("private",)


@pytest.mark.thorough
def test_participants_keep_the_momentum_of_the_private_model():
    method = METHODS["fml"](meme="mlp")
    public = Public(toy.public_images(), toy.PLAIN, 8)
    groups = Groups(
        toy.architectures(0, 0, 0, 0, 0), toy.federation(), method, Local(1, 8, "keep"), seed=0, public=public,
        pipeline=toy.PLAIN, rounds=3, keeps_optimiser=True,
    )  # fmt: skip
    state, _ = groups.step(groups.start(), 0)
    (statistics,) = state.statistics
    momentum = [tree for tree in jax.tree.leaves(statistics[OPTIMISER], is_leaf=lambda x: isinstance(x, dict)) if tree]
    assert set(momentum[0]) == {"private", "meme"}
    assert all(np.abs(x).max() > 0 for x in leaves(momentum[0]["private"]))


@pytest.mark.thorough
def test_a_run_keeps_optimiser_state_and_can_be_resumed(tmp_path):
    options = ["--method=fedavg", "--rounds=2", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--quiet"]
    results = {}
    for state_option in ("fresh", "kept"):
        folder = tmp_path / state_option
        assert main([*options, f"--optimizer-state={state_option}", f"--run-dir={folder}"]) == 0
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        results[state_option] = [json.loads(line)["loss"] for line in lines]
    assert results["fresh"][0] == results["kept"][0]
    assert results["fresh"][1] != results["kept"][1]
    shutil.rmtree(tmp_path / "kept" / "checkpoints" / "2")
    assert main([f"--resume={tmp_path / 'kept'}", "--quiet"]) == 0
    last_line = (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()[1]
    assert json.loads(last_line)["loss"] == results["kept"][1]
