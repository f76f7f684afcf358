"""Random combinations of options: where states and samples are kept, and an interruption, change no bit of a run."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import fedjax_pcdd as fp
from fedjax_pcdd import methods

CHOICES = {
    "cohort": (None, 2),
    "batch_size": (4, 7, 16),
    "last_batch": ("drop", "keep", "top_up", "strict"),
    "optimizer": ("sgd", "adam"),
    "optimizer_state": ("fresh", "kept"),
    "momentum": (0.0, 0.9),
    "lr_steps": ("", "1"),
    "bn": ("average", "local", "local-layers", "group"),
    "neck": (0, 1),
    "loss": ("ce", "focal"),
    "class_weights": ("none", "pooled", "local"),
    "weights": ("method", "uniform", "batches"),
    "grad_clip": ("method", 1.0),
    "shuffle": (True, False),
    "lost_share": (0.0, 0.3),
    "eval_every": (1, 2),
    "fine_tune_epochs": (0, 1),
    "pa_protocol": (None, "received", "best_epoch", "best_mean"),
    "validation": (None, 0.2),
}
SPLITS = (("pcdd", {"classes_per_client": 4}), ("dirichlet", {"beta": 0.3}), ("quantity", {"beta": 2.0}))
NAMES = [name for name in methods.METHODS if not methods.get(name)().traits().own_models]
SUFFIXES = ("", "", "+adam", "+avgm", "+prototypes")


class Normalised(nn.Module):
    """A backbone with batch norm."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x.reshape(len(x), -1))))


def drawn(draws):
    """A federation and the arguments of a run, each an independent choice; half of the options stay as they are."""
    partition, setting = SPLITS[draws.integers(len(SPLITS))]
    digits = fp.load_dataset("digits")
    federation = fp.partition(digits, partition, clients=3, seed=int(draws.integers(100)), **setting)
    options = {name: values[draws.integers(len(values))] for name, values in CHOICES.items() if draws.integers(2)}
    name = str(draws.choice(NAMES)) + str(draws.choice(SUFFIXES))
    return federation, {"method": name, "seed": int(draws.integers(100)), "lr": 0.02} | options


def outcome(federation, options, **further):
    """What a run leaves: rows of the metrics without their times, accuracies of clients, and the last model."""
    history = fp.simulate(federation, model=Normalised, rounds=3, local_epochs=1, lanes=1, **options, **further)
    rows = [{name: value for name, value in row.items() if "seconds" not in name} for row in history.rows]
    return rows, history.pa_per_client, jax.tree.leaves(history.variables)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice about what is combined
@pytest.mark.parametrize("seed", range(10))
def test_storage_and_an_interruption_change_no_bit_whatever_is_combined(seed, tmp_path):
    draws = np.random.default_rng(seed)
    while True:
        federation, options = drawn(draws)
        try:
            expected = outcome(federation, options)
            break
        except fp.UserError as refusal:
            if "finite" in str(refusal):
                raise

    def stop(run, report):
        if run.round == 2:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        outcome(federation, options, run_dir=folder, callbacks=[stop])
    elsewhere = {"client_state": "host", "data": "stream"}
    for found in (outcome(federation, options, **elsewhere), outcome(federation, options, run_dir=folder, resume=True)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
