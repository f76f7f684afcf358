"""What a run records before its clients have trained."""

import numpy as np
import pytest
from in_memory import trained

from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.loop import Callback, loop
from fedjax_pcdd.training.tasks import setup


@pytest.mark.thorough
def test_clients_without_steps_have_the_initial_models_accuracy():
    config, method = build(
        {
            "method": "fedavg", "clients": 5, "min_samples": 1, "beta": 0.1, "rounds": 1, "lanes": 1, "quiet": True,
            "last_batch": "strict", "batch_size": 256,
        }
    )  # fmt: skip
    parts, known = setup([(config, method)]), []
    idle = parts.simulation.steps[0] == 0
    assert 0 < idle.sum() < 5

    class Look(Callback):
        def on_start(self, run):
            known.extend(not np.isnan(accuracy) for accuracy in run.history.pa_clients)

    loop(parts.simulation, parts.simulation.start(), 1, [parts.accuracies(0), Look()])
    np.testing.assert_array_equal(known, parts.federations[0].test_sizes > 0)
    assert all(np.array(known)[idle])


@pytest.mark.thorough
def test_a_round_records_the_scalars_that_the_method_names():
    small = {"clients": 3, "rounds": 1, "local_epochs": 1, "train_samples": 90, "lanes": 1, "fine_tune_epochs": 0}
    run = trained(method="fedgf+exp", **small)
    (row,) = run.history.rows
    servers = run.state.servers
    for name in ("divergence", "share", "extrapolation"):
        assert row[name] == float(getattr(servers, name)[0])
    assert row["divergence"] > 0
