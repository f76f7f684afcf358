"""Training with the ruled weights, divisors, epochs and clipping does not diverge: three seeds, clients of two classes.

Settings are the presets' but for the size: fewer samples, epochs and rounds, and a small network.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedjax_pcdd as fp
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.loop import loop
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.presets import PRESETS, read_preset
from fedjax_pcdd.training.setup import Given
from fedjax_pcdd.training.tasks import setup

DATA = Path(os.environ.get("PCDD_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
TABLE1 = {"preset": "fedmr/table1", "split": "P10C2"}
TABLE2 = {"preset": "fedgela/table2", "split": "full-dir0.1", "neck": "0"}
MOMENTUM = {"lr": "0.01", "momentum": "0.9"}  # of the presets that have no row for SCAFFOLD
METHODS = {
    "feddc": TABLE1, "feddyn": TABLE1, "scaffold": MOMENTUM, "fedgen": TABLE2, "fedrep": TABLE2, "fedavg": TABLE2,
}  # fmt: skip
OWN_OPTIONS = {"fedrep": {"head_epochs": "1", "body_epochs": "1"}}
SMALL = {
    "partition": "pcdd", "clients": "10", "classes_per_client": "2", "rounds": "15", "local_epochs": "2",
    "batch_size": "16", "lanes": "1", "fine_tune_epochs": "0", "pa_protocol": "none",
}  # fmt: skip
# Accuracies above chance: one of ten classes; for FedRep, which has no global model, one of a client's two.
LEARNED = {"fedrep": ("pa", 0.6, 0.75)}


def run(method, dataset, seed, **overrides):
    """The run of a method after its last round."""
    data = {"dataset": dataset, "model": "mlp" if dataset == "digits" else "simple_cnn", "train_samples": "1400"}
    options = {"method": method, "seed": str(seed), "test_samples": "355", "data_dir": str(DATA)}
    return in_memory({**METHODS[method], **SMALL, **OWN_OPTIONS.get(method, {}), **data, **options, **overrides})


def in_memory(options):
    config, method = configure(options, PRESETS)
    prepared = setup([(config, method)])
    return loop(prepared.simulation, prepared.simulation.start(), config.rounds, [prepared.accuracies(0)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dataset", ["digits", "fashion_mnist"])
@pytest.mark.parametrize("method", METHODS)
def test_the_papers_settings_train_on_clients_of_two_classes(method, dataset, seed):  # E2, E5, E6, E7, E10
    if dataset != "digits" and not (DATA / f"{dataset}.npz").is_file():
        pytest.skip(f"{dataset}.npz is not in {DATA}; set PCDD_DATA")
    result = run(method, dataset, seed)
    assert np.isfinite([row["loss"] for row in result.history.rows]).all()
    name, last, best = LEARNED.get(method, ("ga", 0.12, 0.2))
    accuracies = [row[name] for row in result.history.rows]
    assert max(accuracies) > best
    assert accuracies[-1] > last


def cells():
    """One cell of each method or variant, in the first split of each preset for images; tasks would need files."""
    for name in sorted(str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.rglob("*.yaml")):
        preset = read_preset(name, PRESETS)
        if name != "fedmr/shakespeare" and not name.startswith("fccl/"):
            split, varied = next(iter(preset.splits)), [variant["method"] for variant in preset.variants.values()]
            rows = [*(method for method in preset.methods if method not in varied), *preset.variants]
            yield from (pytest.param(name, split, row, id=f"{name}-{row}") for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(("preset", "split", "row"), [*cells()])
def test_every_method_of_a_preset_can_be_set_up(preset, split, row):
    selection = {"variant": row} if row in read_preset(preset, PRESETS).variants else {"method": row}
    overrides = {"model": "mcmahan_cnn", "batch_size": "4", "rounds": "2", "initial_weights": "none"}
    config, method = configure({"preset": preset, "split": split, **selection, **overrides}, PRESETS)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (8 * 20, 16, 16, 3), np.uint8), np.arange(8 * 20) % 20
    federation = fp.partition(fp.from_arrays(images, labels, images, labels), "iid", clients=8)
    setup([(replace(config, cohort=None), method)], Given(federation))


@pytest.mark.thorough
def test_without_the_ruled_settings_feddc_diverges_with_a_user_error():  # E2
    with pytest.raises(UserError, match="not finite"):
        run("feddc", "digits", 0, step_normaliser="steps", grad_clip="none", server_step="full", rounds="30")


@pytest.mark.parametrize("method", ["feddc", "scaffold"])
def test_the_divisor_that_diverges_is_available_but_advised_against(method):  # E2
    options = {**METHODS[method], **SMALL, "method": method, "dataset": "digits", "model": "mlp"}
    simulations = [
        setup([configure({**options, "step_normaliser": value}, PRESETS)]).simulation for value in ("steps", "a_k")
    ]
    diverging_advice, ruled_advice = (
        [text for advice in simulation.advice for text in advice] for simulation in simulations
    )
    assert any("diverges: set `step_normaliser=auto`" in text for text in diverging_advice)
    assert not any("diverges" in text for text in ruled_advice)
