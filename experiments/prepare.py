"""Download a data set and prepare it, once: python experiments/prepare.py NAME --data-dir=DIR.

Only this script touches the network, and only it needs TensorFlow (pip install 'fedjax-pcdd[prepare]').
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from fedjax_pcdd.data.sources import DATASETS, TFDS_NAMES, default_root
from fedjax_pcdd.errors import UserError, nearest


def prepare(name: str, data_dir: Path) -> Path:
    """Download `name` and write it below `data_dir` in the array_record format; gives its folder.

    Raises:
      UserError: unknown name, no TensorFlow, or the download failed.
    """
    if name in DATASETS and name not in TFDS_NAMES:
        built_in = name == "digits"
        need = "is built in" if built_in else f"comes as {name}.npz (docs/data.md)"
        raise UserError(f"The data set '{name}' {need} and needs no preparation.")
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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"'{name}' could not be downloaded to {data_dir} ({reason}).") from error
    return Path(builder.data_dir)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 when the data set is there, 2 for what the user can put right."""
    parser = argparse.ArgumentParser(description="Download a data set and prepare it, once.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name from --list, or any TFDS name")
    parser.add_argument("--data-dir", type=Path, default=default_root(), help="default: %(default)s")
    parser.add_argument("--list", action="store_true", help="list the data sets that can be prepared")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(f"{name:15} {DATASETS[name]}" for name in TFDS_NAMES))
        return 0
    if given.name is None:
        parser.error("name a data set, or use --list")
    try:
        print(f"Prepared in {prepare(given.name, given.data_dir.expanduser())}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
