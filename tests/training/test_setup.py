"""The parts of a run are made once, however many simulations are made of them."""

import gc
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import struct

import fedjax_pcdd as fp
import fedjax_pcdd.training.build as build_module
from fedjax_pcdd.data.dermoscopy import drawn_once
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.fine_tuning import calibrator_of
from fedjax_pcdd.training.tasks import setup

TRAINING_IMAGES = (1442, 8, 8, 1)


@struct.dataclass
class Headless(fp.Method):
    """A fixed classifier on the features, without a head; by default its fine-tuning would be FedAvg's."""

    def build(self, model):
        return model.clone(head=False)

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return model.apply(variables, images, train=False).features[:, :10]


def prepared(**options):
    return setup([build({"dataset": "digits", "clients": 3, "beta": 1.0, "model": "mlp", "quiet": True} | options)])


def test_a_model_without_a_head_that_nothing_fine_tunes_is_refused_before_it_trains():
    config, _ = build({"dataset": "digits", "clients": 3, "beta": 1.0, "model": "mlp", "quiet": True})
    with pytest.raises(UserError, match="has no head, without which the default fine_tuner cannot train it"):
        setup([(config, Headless())])
    setup([(replace(config, fine_tune_epochs=0), Headless())])


def copies() -> int:
    gc.collect()
    return len({x.unsafe_buffer_pointer() for x in jax.live_arrays() if x.shape == TRAINING_IMAGES})


@pytest.mark.parametrize("method", ["fedavg", "feddf"])
def test_samples_are_on_the_device_once(method):
    before = copies()
    run = prepared(method=method, lanes=2)
    run.settle(run.start(), None, print)
    tuner, calibrator = run.simulation.tuner(1), calibrator_of(run.simulation)
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
    run.settle(run.start(), None, print)
    assert names == ["digits_public"]


def test_what_augmentation_draws_once_follows_the_seed_of_the_run(tmp_path):
    images, labels = np.full((16, 28, 28, 3), 9, np.uint8), np.arange(16) % 8
    np.savez(tmp_path / "isic2019.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    options = {"dataset": "isic2019", "data_dir": tmp_path, "partition": "iid", "clients": 2}
    runs = [prepared(seed=seed, **options) for seed in (0, 1)]
    assert [run.pipelines()[0].own for run in runs] == [drawn_once(25, 0), drawn_once(25, 1)]
    assert drawn_once(25, 0) != drawn_once(25, 1)


def test_the_seed_of_a_run_draws_its_public_images_and_their_labels():
    first, second = (prepared(method="fedmd", transfer_epochs=1, seed=seed) for seed in (0, 1))
    assert (first.public != second.public).any()
    assert (first.public_labels != second.public_labels).any()
