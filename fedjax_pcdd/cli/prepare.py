"""Download a data set and prepare it, once: the only command that touches the network, and that needs TensorFlow.

It also writes the clients of an available data set to a folder of memory-mapped files.
"""

# ruff: noqa: RUF009 - run_option is a dataclass field, not a value

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedjax_pcdd.cli.messages import invocation
from fedjax_pcdd.cli.options import command
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.natural import write_federation
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.data.sources import DATASETS, TFDS_NAMES, load, root_of
from fedjax_pcdd.errors import UserError, in_one_line, nearest
from fedjax_pcdd.training.fields import run_option


@dataclass(frozen=True)
class PrepareOptions:
    """Download data sets and prepare them, once; needs pip install 'fedjax-pcdd[prepare]'."""

    WORD: ClassVar[str] = "DATASET"

    runs: tuple[Path, ...] = run_option((), "", "names of data sets, from the list or any TFDS name")
    data_dir: Path = run_option(root_of(None), "", "folder that they are written to, or with `federation` read from")
    federation: Path | None = run_option(None, "",
        "new folder that gets the samples of a data set that is at hand, by writer or centre; `dataset=FOLDER` maps "
        "them, of any number of clients")  # fmt: skip
    list: bool = run_option(False, "", "list the data sets that can be prepared")


def prepare_main(argv: Sequence[str] | None = None) -> int:
    """Prepare what the arguments name; exit code 0, or 2 for what the user can put right."""
    return command(PrepareOptions, _prepare, argv, invocation("prepare"))


def _prepare(options: PrepareOptions) -> None:
    if options.list:
        print("\n".join(f"{name:15} {DATASETS[name]}" for name in TFDS_NAMES))
    elif not options.runs:
        raise UserError("name a data set, or use `list`.")
    if options.federation is not None and len(options.runs) != 1:
        raise UserError("`federation` is written of one data set: name one.")
    for name in options.runs:
        if options.federation is None:
            print(f"Prepared in {prepare(str(name), options.data_dir)}")
        else:
            print(f"Written to {_by_client(str(name), options)}")


def _by_client(name: str, options: PrepareOptions) -> Path:
    dataset = load(name, options.data_dir)
    if dataset.groups is None:
        raise UserError(f"'{name}' names no writers or domains, so that there are no clients to write.")
    clients = partition("natural", dataset.y_train, dataset.y_test, groups=dataset.groups)
    assert options.federation is not None
    return write_federation(options.federation, Federation(dataset, clients), name=dataset.name)


def prepare(name: str, data_dir: Path) -> Path:
    """Download `name`, write it below `data_dir` in the array_record format, and return its folder.

    Raises:
      UserError: unknown name, no TensorFlow, or the download failed.
    """
    if name in DATASETS and name not in TFDS_NAMES:
        reason = "is built in" if name == "digits" else f"comes as {name}.npz (docs/data.md)"
        raise UserError(f"The data set '{name}' {reason} and needs no preparation.")
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError("Preparing a data set needs TensorFlow; run: pip install 'fedjax-pcdd[prepare]'")
    import tensorflow_datasets as tfds

    settings = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        builder = tfds.builder(TFDS_NAMES.get(name, name), data_dir=data_dir, file_format="array_record")
        builder.download_and_prepare(download_config=settings)
    except tfds.core.DatasetNotFoundError:
        raise UserError(f"TFDS has no data set '{name}'; {nearest(name, TFDS_NAMES)}") from None
    except (OSError, tfds.download.DownloadError) as error:
        raise UserError(f"'{name}' could not be downloaded to {data_dir} ({in_one_line(error)}).") from error
    return Path(builder.data_dir)
