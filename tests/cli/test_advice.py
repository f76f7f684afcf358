"""What the command line says of a run's settings before it trains."""

import pytest

from fedjax_pcdd.cli.messages import flag
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.training import loop

SMALL = {"lanes": 1, "clients": 3, "min_samples": 1, "rounds": 1, "fine_tune_epochs": 0}


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch):
    def refuse(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Runs, "train", refuse)


def said(tmp_path, capsys, **options):
    arguments = [f"{flag(name)}={value}" for name, value in (SMALL | options).items()]
    assert main([*arguments, f"--run-dir={tmp_path / 'run'}"]) == 130
    *advice, stopped = capsys.readouterr().err.splitlines(keepends=True)
    assert stopped.startswith("stopped")
    return "".join(advice)


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_momentum_is_advised_against_before_training(tmp_path, capsys, method):
    text = said(tmp_path, capsys, method=method, momentum=0.9, step_normaliser="steps")
    assert text.startswith("warning: ")
    assert "--step-normaliser=auto" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_the_defaults_count_momentum(tmp_path, capsys, method):
    assert said(tmp_path, capsys, method=method, momentum=0.9) == ""


def test_momentum_without_clipping_is_advised_against(tmp_path, capsys):
    assert "--grad-clip=10" in said(tmp_path, capsys, method="scaffold", momentum=0.9, grad_clip="none")


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_adam_has_no_momentum_to_advise_against_but_is_no_sgd(tmp_path, capsys, method):
    text = said(tmp_path, capsys, method=method, optimizer="adam", momentum=0.9)
    assert "with --optimizer=adam they are not" in text
    assert "--optimizer=sgd" in text
    assert "momentum" not in text


@pytest.mark.parametrize(
    ("method", "remedy", "options"),
    [("fedlc", "--counted=global", {}), ("fedgela", "--denominator=all", {"denominator": "present"})],
)
def test_one_class_clients_are_said_where_their_loss_has_no_gradient(tmp_path, capsys, method, remedy, options):
    split = {"partition": "pcdd", "clients": 10, "classes_per_client": 1}
    text = said(tmp_path, capsys, method=method, **split, **options)
    assert "10 clients have one class" in text
    assert remedy in text


def test_dynamic_regularisation_of_strength_zero_is_said(tmp_path, capsys):
    assert "--alpha" in said(tmp_path, capsys, method="feddyn", alpha=0.0)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"method": "feddyn", "momentum": 0.9}, "--server-step=none"),
        ({"method": "fedgen", "alpha": 10.0, "beta_kl": 1.0}, "--alpha=10 has ended"),
    ],
    ids=["two momenta", "heavy features"],
)
def test_a_reading_that_ended_at_chance_is_not_silent(tmp_path, capsys, options, remedy):
    assert remedy in said(tmp_path, capsys, **options)


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ({"partition": "iid", "beta": 1.0, "min_samples": 10}, "--beta=1"),
        ({"beta": 0.5, "classes_per_client": 3}, "--classes-per-client=3"),
        ({"doubled": True}, "--doubled=1"),
        ({"partition": "iid", "min_samples": 3}, "--min-samples=3"),
        ({"partition": "iid", "min_samples": 10, "retry": False}, "--retry=0"),
    ],
)
def test_an_option_of_another_partition_is_said_to_have_no_effect(tmp_path, capsys, options, unread):
    text = said(tmp_path, capsys, **options)
    assert text == f"warning: {unread} has no effect with --partition={options.get('partition', 'dirichlet')}.\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": "adam", "momentum": 0.5}, "--momentum=0.5 has no effect with --optimizer=adam."),
        ({"focal_gamma": 3.0}, "--focal-gamma=3 has no effect with --loss=ce."),
        ({"lr_decay": 0.5}, "--lr-decay=0.5 has no effect without --lr-steps."),
        ({"data": "device", "data_memory": 100}, "--data-memory=100 has no effect with --data=device."),
        ({"task_split": "code"}, "--task-split=code has no effect without --task."),
        ({"track_every": 2}, "--track-every=2 has no effect without --track."),
        ({"track_local": False}, "--track-local=0 has no effect without --track."),
        ({"pretrain_batch_size": 64}, "--pretrain-batch-size=64 has no effect without --pretrain-epochs."),
        ({"public": "digits_public"}, "--public=digits_public has no effect with --method=fedavg."),
        ({"public_samples": 64}, "--public-samples=64 has no effect with --method=fedavg."),
        ({"method": "feddf", "public_batch": 64}, "--public-batch=64 has no effect with --method=feddf."),
    ],
)
def test_an_option_of_another_option_is_said_to_have_no_effect(tmp_path, capsys, options, sentence):
    assert sentence in said(tmp_path, capsys, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"method": "feddf", "public_samples": 64},
        {"method": "fedmd", "public_samples": 64, "public_batch": 32, "transfer_epochs": 1, "pretrain_batch_size": 64},
        {"method": "fccl", "public_samples": 64, "pretrain_epochs": 1, "pretrain_batch_size": 64},
        {"track": "angles", "track_every": 2, "track_local": False},
    ],
)
def test_an_option_that_is_looked_at_is_not(tmp_path, capsys, options):
    assert "no effect" not in said(tmp_path, capsys, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("bn", ["local", "local-layers", "group"])
def test_an_option_about_norms_that_the_model_has_not_is_said_to_have_no_effect(tmp_path, capsys, bn):
    sentence = f"warning: --bn={bn} has no effect: the model has no such norms.\n"
    assert said(tmp_path / "without", capsys, model="mlp", bn=bn) == sentence
    assert said(tmp_path / "with", capsys, model="resnet8_stride2", bn=bn) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedgela", "fedrod"])
def test_personal_answers_in_the_ga_of_own_layers_are_said(tmp_path, capsys, method):
    assert "ga_server_average" in said(tmp_path, capsys, method=method, model="resnet8_stride2", bn="local-layers")


def test_a_quiet_run_advises_nothing(tmp_path, capsys):
    assert said(tmp_path, capsys, method="scaffold", momentum=0.9, step_normaliser="steps", quiet=True) == ""


def test_good_settings_need_no_advice(tmp_path, capsys):
    assert said(tmp_path, capsys, method="scaffold", momentum=0.0) == ""
