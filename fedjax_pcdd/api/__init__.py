"""The Python interface: data in, a federation, a method object, `simulate`, and a history that plots itself.

Everything is reached through `fp` (`import fedjax_pcdd as fp`). Results are those of the command line with the same
options. A wrong argument raises a `UserError` that explains it in one sentence. docs/python_api.md is a quick tour.
"""

from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.data.augment import AUGMENTATIONS
from fedjax_pcdd.data.partition import PARTITIONS
from fedjax_pcdd.data.sources import LOADERS
from fedjax_pcdd.methods import METHODS, SERVER_OPTIMISERS
from fedjax_pcdd.models import BACKBONES
from fedjax_pcdd.training.loggers import LOGGERS

# Decorators that register a user's own part under a name.
register_method = METHODS.register
register_model = BACKBONES.register
register_dataset = LOADERS.register
register_partition = PARTITIONS.register
register_augmentation = AUGMENTATIONS.register
register_quantity = QUANTITIES.register
register_logger = LOGGERS.register
register_server_optimiser = SERVER_OPTIMISERS.register
