"""The parts of a run are made once, however many simulations are made of them."""

import gc

import jax
import pytest

import fedjax_pcdd.training.build as build_module
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.fine_tuning import calibrator_of
from fedjax_pcdd.training.tasks import setup

TRAINING_IMAGES = (1442, 8, 8, 1)


def prepared(**options):
    return setup([build({"dataset": "digits", "clients": 3, "beta": 1.0, "model": "mlp", "quiet": True} | options)])


def copies() -> int:
    gc.collect()
    return len({x.unsafe_buffer_pointer() for x in jax.live_arrays() if x.shape == TRAINING_IMAGES})


@pytest.mark.parametrize("method", ["fedavg", "feddf"])
def test_samples_are_on_the_device_once(method):
    before = copies()
    run = prepared(method=method, lanes=2)
    simulation = run.settled(run.start(), None, print)
    tuner, calibrator = simulation.tuner(1), calibrator_of(simulation)
    assert tuner.data.train.images is calibrator.data.train.images
    assert copies() - before == 1


def test_other_samples_than_the_simulations_are_loaded():
    first, second = (prepared(seed=seed) for seed in (0, 1))
    other = first.simulation.alike(second.simulation.experiments, 3)
    assert other.data.train.start.tolist() == second.simulation.data.train.start.tolist()
    assert other.data.train.start.tolist() != first.simulation.data.train.start.tolist()


@pytest.mark.parametrize("method", ["feddf", "fccl"])
def test_public_images_are_read_once(monkeypatch, method):
    names, load = [], build_module.load_public
    monkeypatch.setattr(build_module, "load_public", lambda name, *a, **b: names.append(name) or load(name, *a, **b))
    run = prepared(method=method, lanes=2)
    run.settled(run.start(), None, print)
    assert names == ["digits_public"]
