"""What a run says of its settings before it trains."""

import pytest

from fedjax_pcdd.harness.config import build
from fedjax_pcdd.harness.runner import Run

SMALL = {"lanes": 1, "clients": 3, "min_samples": 1, "rounds": 1}


def said(tmp_path, capsys, **options):
    config, method = build(SMALL | {"run_dir": tmp_path / "run"} | options)
    work = Run(config, method)
    work.checkpoints.close()
    return capsys.readouterr().err


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_momentum_is_advised_against_before_training(tmp_path, capsys, method):
    text = said(tmp_path, capsys, method=method, momentum=0.9)
    assert text.startswith("warning: ")
    assert "--step-normaliser=a_k" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_adam_has_no_momentum_to_advise_against(tmp_path, capsys, method):
    assert said(tmp_path, capsys, method=method, optimizer="adam", momentum=0.9) == ""


def test_a_quiet_run_advises_nothing(tmp_path, capsys):
    assert said(tmp_path, capsys, method="scaffold", momentum=0.9, quiet=True) == ""


def test_good_settings_need_no_advice(tmp_path, capsys):
    assert said(tmp_path, capsys, method="scaffold", momentum=0.0) == ""
