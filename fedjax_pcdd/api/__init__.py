"""The Python interface: data in, a federation, a method object, `simulate`, and a history that plots itself.

    import fedjax_pcdd as fp

Everything here is reached through `fp`. Results are those of `experiments/run.py` with the same options, but nothing is
written. What is wrong with an argument is said by a `UserError` in one sentence. docs/python_api.md is a quick tour.
"""

from fedjax_pcdd.analysis.quantities import QUANTITIES, Quantity
from fedjax_pcdd.api.data import Dataset, Federation, Partition, build_model, from_arrays, load_dataset, partition
from fedjax_pcdd.api.history import History, plot, table
from fedjax_pcdd.api.runs import load_run, resume
from fedjax_pcdd.api.simulate import Pipeline, simulate
from fedjax_pcdd.data.augment import AUGMENTATIONS
from fedjax_pcdd.data.lists import PARTITIONERS
from fedjax_pcdd.data.sources import LOADERS
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Message, Method, Summary, Traits, hyperparameter
from fedjax_pcdd.models import BACKBONES
from fedjax_pcdd.training.callbacks import EarlyStopping
from fedjax_pcdd.training.loggers import LOGGERS
from fedjax_pcdd.training.loop import Callback

# Decorators that add a part of one's own under a name.
register_method = METHODS.register
register_model = BACKBONES.register
register_dataset = LOADERS.register
register_partition = PARTITIONERS.register
register_augmentation = AUGMENTATIONS.register
register_quantity = QUANTITIES.register
register_logger = LOGGERS.register

__all__ = [
    "Callback", "Dataset", "EarlyStopping", "Federation", "History", "Message", "Method", "Partition", "Pipeline",
    "Quantity", "Summary", "Traits", "UserError", "build_model", "from_arrays", "hyperparameter", "load_dataset",
    "load_run", "partition", "plot", "register_augmentation", "register_dataset", "register_logger",
    "register_method", "register_model", "register_partition", "register_quantity", "resume", "simulate", "table",
]  # fmt: skip
