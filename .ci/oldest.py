"""Prints the oldest version of each package that pyproject.toml allows, as pip's `--constraint` takes them."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in project["dependencies"] + extras["test"]:
    if found := re.match(r"([\w-]+)>=([\w.]+)", requirement):
        print(f"{found[1]}=={found[2]}")
