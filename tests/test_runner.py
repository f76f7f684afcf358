"""What a run records before its clients have trained."""

import numpy as np
from fedjax_pcdd.training.runner import Run

from fedjax_pcdd.training.config import build


def test_clients_without_steps_have_the_initial_models_accuracy(tmp_path):
    config, method = build(
        {
            "method": "fedavg", "clients": 5, "min_samples": 1, "beta": 0.1, "rounds": 1, "lanes": 1, "quiet": True,
            "last_batch": "strict", "batch_size": 256, "run_dir": tmp_path / "run",
        }
    )  # fmt: skip
    work = Run(config, method)
    idle = work.simulation.steps[0] == 0
    assert 0 < idle.sum() < 5
    progress = work.begin()
    work.checkpoints.close()
    known = [accuracy is not None for accuracy in progress.history.pa_clients]
    np.testing.assert_array_equal(known, work.federation.test_sizes > 0)
    assert all(np.array(known)[idle])
