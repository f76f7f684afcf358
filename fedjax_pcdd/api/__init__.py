"""The Python interface: data in, a federation, a method object, `simulate`, and a history that plots itself.

    import fedjax_pcdd as fp

Everything here is reached through `fp`. Results are those of `experiments/run.py` with the same options, but nothing is
written. What is wrong with an argument is said by a `UserError` in one sentence. docs/python_api.md is a quick tour.
"""

from fedjax_pcdd.api.data import Dataset, Federation, Partition, build_model, from_arrays, load_dataset, partition
from fedjax_pcdd.api.history import History, plot, table
from fedjax_pcdd.api.runs import load_run, resume
from fedjax_pcdd.api.simulate import Pipeline, simulate
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method, hyperparameter
from fedjax_pcdd.training.callbacks import EarlyStopping
from fedjax_pcdd.training.loop import Callback

__all__ = [
    "Callback", "Dataset", "EarlyStopping", "Federation", "History", "Method", "Partition", "Pipeline", "UserError",
    "build_model", "from_arrays", "hyperparameter", "load_dataset", "load_run", "partition", "plot", "resume",
    "simulate", "table",
]  # fmt: skip
