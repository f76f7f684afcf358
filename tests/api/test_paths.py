"""A run folder may have any name that the file system allows."""

import os

import pytest
from test_trusted_folder import OPTIONS, begin

from fedjax_pcdd.api.runs import resume, run
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.config import build

NAMES = [b"a [v2]", b"a\\b", b"caf\xe9", "größe".encode(), b"x" * 255, b"gs:", b"new\nline"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[3:])])
def test_a_run_in_a_folder_of_any_name_can_be_continued(tmp_path, name):
    folder = tmp_path / os.fsdecode(name)
    begin(folder)
    assert len(resume(folder).rows) == OPTIONS["rounds"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES[1:3])
def test_runs_in_folders_with_backslash_or_non_utf8_names_can_be_continued(tmp_path, name):
    folder = tmp_path / os.fsdecode(name)
    begin(folder, rounds=1)
    assert len(resume(folder).rows) == OPTIONS["rounds"]


@pytest.mark.thorough
def test_a_folder_name_that_is_too_long_is_a_user_error(tmp_path):
    config, method = build(OPTIONS | {"run_dir": tmp_path / ("x" * 300)})
    with pytest.raises(UserError, match=r"cannot write to .*File name too long"):
        run(config, method)
    with pytest.raises(UserError, match="there is no folder"):
        resume(tmp_path / ("x" * 300))
