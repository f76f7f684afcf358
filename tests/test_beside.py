"""Files beside a file of the user that it imports: found, recorded, and unchanged when a run is resumed."""

import shutil
import sys

import pytest
import yaml

from fedjax_pcdd.beside import imported_files
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.registry import load_object
from fedjax_pcdd.training.config import dump, parse_config
from fedjax_pcdd.training.presets import read_run

METHOD = """
import math
import numpy
from flax import struct
import fedjax_pcdd as fp
from scales import SCALE

@struct.dataclass
class Scaled(fp.FedProx):
    def penalty(self, variables, outputs, batch, context):
        return SCALE * super().penalty(variables, outputs, batch, context)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: a method, and a file from which it has a number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "scales", raising=False)  # of another test
    write(tmp_path / "mine.py", METHOD)
    write(tmp_path / "scales.py", "SCALE = 2.0\n")
    return tmp_path


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def names(file):
    return {str(path.relative_to(file.parent)): name for path, name in imported_files(file).items()}


def test_imports_are_followed_from_file_to_file_but_not_to_other_packages(folder):
    write(folder / "scales.py", "def late():\n    from tools.far import X\n\nSCALE = 2.0\n")
    write(folder / "tools/__init__.py", "from . import near\n")
    write(folder / "tools/near.py", "from ..mine import nothing\nimport scales\n")
    write(folder / "tools/far.py", "X = 1\n")
    write(folder / "unrelated.py", "X = 1\n")
    write(folder / "fedjax_pcdd/__init__.py", "raise SystemExit\n")  # beside a checkout of this package
    assert names(folder / "mine.py") == {
        "scales.py": "scales", "tools/__init__.py": "tools", "tools/near.py": "tools.near", "tools/far.py": "tools.far",
    }  # fmt: skip


def test_of_an_installed_package_only_its_own_files_are_found(folder):
    write(folder / "site/own/__init__.py", "")
    write(folder / "site/own/method.py", "import other\nfrom own import parts\nfrom .deep.er import y\n")
    for name in ("other", "own/parts", "own/deep/__init__", "own/deep/er"):
        write(folder / f"site/{name}.py", "x = 1\n")
    found = imported_files(folder / "site/own/method.py")
    assert set(found.values()) == {"own", "own.parts", "own.deep", "own.deep.er"}


def test_a_file_that_is_not_python_imports_nothing(folder):
    write(folder / "scales.py", "SCALE = = 2\n")
    assert names(folder / "mine.py") == {"scales.py": "scales"}


def test_a_run_is_not_resumed_if_a_file_that_its_method_imports_has_changed(folder):
    options = ["--rounds=1", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--train-samples=200", "--quiet"]
    assert main(["--method=mine.py:Scaled", "--run-dir=run", *options]) == 0
    recorded = yaml.safe_load((folder / "run/config.yaml").read_text())["from_outside"]
    assert set(recorded) == {"mine.py:Scaled", str(folder / "scales.py")}
    write(folder / "scales.py", "SCALE = 3.0\n")
    with pytest.raises(UserError, match=r"scales.py has changed since this run began: put it back"):
        read_run(folder / "run")


def test_a_file_that_changed_after_its_import_is_not_used_as_it_was(folder):
    load_object("mine.py:Scaled")
    write(folder / "scales.py", "SCALE = 3.0\n")
    with pytest.raises(UserError, match=r"scales.py has changed since it was imported: start Python anew"):
        load_object("mine.py:Scaled")


def test_a_method_whose_file_changed_after_its_import_is_not_recorded_with_the_new_content(folder):
    config, method = parse_config("method: mine.py:Scaled")  # as a sweep does long before its last run begins
    assert "mine.py:Scaled" in dump(config, method)
    write(folder / "mine.py", METHOD + "# edited\n")
    with pytest.raises(UserError, match=r"mine.py has changed since it was imported: start Python anew"):
        dump(config, method)


def test_files_of_one_name_in_two_folders_are_not_mixed_up(folder):
    load_object("mine.py:Scaled")
    shutil.copytree(folder, folder / "copy")
    with pytest.raises(UserError, match=r"copy/mine.py imports scales.py, but .*/scales.py has that name"):
        load_object("copy/mine.py:Scaled")


@pytest.fixture
def package(folder, monkeypatch):
    """A method that its package imports, too, relatively, and a module beside it by its bare name."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lab", "bare")]:
        monkeypatch.delitem(sys.modules, name)
    method = METHOD.replace("from scales", "import bare\nfrom .. import LEVEL\nfrom ..scales")
    write(folder / "lab/__init__.py", "LEVEL = 1\nfrom .own import keep\n")
    write(folder / "lab/scales.py", "SCALE = 2.0\n")
    write(folder / "lab/own/__init__.py", "")
    write(folder / "lab/own/keep.py", method.replace("@", '@fp.register_method("scaled")\n@'))
    write(folder / "lab/own/bare.py", "import logging, time\n")
    write(folder / "lab/own/logging.py", "1 / 0\n")  # Python's own comes first
    return folder


def test_a_file_is_imported_as_a_module_of_its_package(package, monkeypatch):
    monkeypatch.setattr(METHODS, "data", dict(METHODS.data))
    path = list(sys.path)
    file = package / "lab/own/keep.py"
    first = load_object(f"{file}:Scaled")
    assert first.__module__.startswith("lab.own.")
    assert sys.path == path
    assert set(imported_files(file).values()) == {"lab", "lab.scales", "lab.own", "bare"}
    write(file, file.read_text() + "X = 1\n")
    second = load_object(f"{file}:Scaled")
    assert METHODS["scaled"] is second is not first


def test_a_run_with_a_method_of_a_package_is_not_resumed_if_the_package_has_changed(package, monkeypatch):
    monkeypatch.setattr(METHODS, "data", dict(METHODS.data))
    options = ["--rounds=1", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--train-samples=200", "--quiet"]
    assert main(["--method=lab/own/keep.py:Scaled", "--run-dir=run", *options]) == 0
    read_run(package / "run")
    write(package / "lab/__init__.py", "LEVEL = 2\nfrom .own import keep\n")
    with pytest.raises(UserError, match=r"lab/__init__.py has changed since this run began: put it back"):
        read_run(package / "run")
