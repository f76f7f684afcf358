"""Warnings of the command line about a run's settings before it trains."""

import numpy as np
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


def advice_on(tmp_path, capsys, **options):
    """What the command writes to stderr about a run before it trains."""
    arguments = [f"{flag(name)}={value}" for name, value in (SMALL | options).items()]
    assert main([*arguments, f"--run-dir={tmp_path / 'run'}"]) == 130
    *lines, last_line = capsys.readouterr().err.splitlines(keepends=True)
    assert last_line.startswith("stopped")
    return "".join(lines)


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_momentum_is_advised_against_before_training(tmp_path, capsys, method):
    text = advice_on(tmp_path, capsys, method=method, momentum=0.9, step_normaliser="steps")
    assert text.startswith("warning: ")
    assert "--step-normaliser=auto" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_the_default_step_normaliser_takes_account_of_momentum(tmp_path, capsys, method):
    assert advice_on(tmp_path, capsys, method=method, momentum=0.9) == ""


def test_momentum_without_clipping_is_advised_against(tmp_path, capsys):
    assert "--grad-clip=10" in advice_on(tmp_path, capsys, method="scaffold", momentum=0.9, grad_clip="none")


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_adam_is_advised_against_as_an_optimizer_and_not_for_momentum(tmp_path, capsys, method):
    text = advice_on(tmp_path, capsys, method=method, optimizer="adam", momentum=0.9)
    assert "with --optimizer=adam they are not" in text
    assert "--optimizer=sgd" in text
    assert "momentum" not in text


@pytest.mark.parametrize(
    ("method", "remedy", "options"),
    [("fedlc", "--counted=global", {}), ("fedgela", "--denominator=all", {"denominator": "present"})],
)
def test_one_class_clients_are_reported_where_their_loss_has_no_gradient(tmp_path, capsys, method, remedy, options):
    partition = {"partition": "pcdd", "clients": 10, "classes_per_client": 1}
    text = advice_on(tmp_path, capsys, method=method, **partition, **options)
    assert "10 clients have one class" in text
    assert remedy in text


@pytest.mark.parametrize(("share", "said"), [(0.005, True), (0.2, False)])
def test_choosing_rounds_on_a_few_validation_samples_is_advised_against(tmp_path, capsys, share, said):
    text = advice_on(tmp_path, capsys, select_on="validation", validation=share)
    assert ("samples in all, which hardly tells rounds apart: raise it." in text) == said


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ([0, 1], None),
        ([1, 3], "--partition gives samples to several clients (1 in all, as sample 3): correct the lists"),
        ([1, 3, 3], "--partition gives client 0 a sample more than once, which then counts as often: correct"),
        ([2, 3, 4, 5], None),  # each twice, as by --doubled
    ],
)
def test_samples_that_clients_have_twice_or_share_are_reported(tmp_path, capsys, first, words):
    np.savez(tmp_path / "lists.npz", train_0=first, train_1=[2, 3, 4, 5])
    text = advice_on(tmp_path, capsys, partition=tmp_path / "lists.npz", clients=2)
    assert words in text if words else "--partition gives" not in text


@pytest.mark.parametrize("shift", [0, 2])
def test_classes_that_have_tests_and_no_training_samples_are_reported(tmp_path, capsys, shift):
    x, y = np.zeros((60, 4, 4, 1), np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y + shift)
    text = advice_on(tmp_path, capsys, dataset=tmp_path / "mine.npz", partition="iid", model="mlp")
    assert ("data set 'mine' has tests, but no training samples, of class 3, 4." in text) == bool(shift)


@pytest.mark.parametrize("asked", [False, True])
def test_a_pass_over_the_data_that_traits_do_not_ask_for_is_reported(tmp_path, capsys, asked):
    traits = "def traits(self):\n        return fp.Traits(summary=Summary())" if asked else "pass"
    (tmp_path / "counts.py").write_text(f"""
import fedjax_pcdd as fp
from fedjax_pcdd.methods.method import Summary
from flax import struct

@struct.dataclass
class Counts(fp.Method):
    def summarise(self, variables, batch, context):
        return batch.mask.sum()
    {traits}
""")
    text = advice_on(tmp_path, capsys, method=f"{tmp_path}/counts.py:Counts")
    assert ("Counts.summarise is not called: let traits give a Summary." in text) == (not asked)


def test_dynamic_regularisation_of_strength_zero_is_reported(tmp_path, capsys):
    assert "--alpha" in advice_on(tmp_path, capsys, method="feddyn", alpha=0.0)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"method": "feddyn", "momentum": 0.9}, "--server-step=none"),
        ({"method": "fedgen", "alpha": 10.0, "beta_kl": 1.0}, "--alpha=10 has ended"),
    ],
    ids=["two momenta", "heavy features"],
)
def test_settings_that_ended_at_chance_level_are_warned_about(tmp_path, capsys, options, remedy):
    assert remedy in advice_on(tmp_path, capsys, **options)


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"partition": "iid", "beta": 1.0, "min_samples": 10}, "--beta=1"),
        ({"beta": 0.5, "classes_per_client": 3}, "--classes-per-client=3"),
        ({"doubled": True}, "--doubled=1"),
        ({"partition": "iid", "min_samples": 3}, "--min-samples=3"),
        ({"partition": "iid", "min_samples": 10, "retry": False}, "--retry=0"),
    ],
)
def test_an_option_of_another_partition_is_said_to_have_no_effect(tmp_path, capsys, options, ignored):
    text = advice_on(tmp_path, capsys, **options)
    assert text == f"warning: {ignored} has no effect with --partition={options.get('partition', 'dirichlet')}.\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"retry": False, "min_samples": 30}, "--min-samples=30 has no effect without --retry."),
        ({"optimizer": "adam", "momentum": 0.5}, "--momentum=0.5 has no effect with --optimizer=adam."),
        ({"optimizer_state": "kept", "momentum": 0.0}, "--optimizer-state=kept has no effect without --momentum."),
        ({"method": "ditto", "fine_tune_epochs": 5}, "--fine-tune-epochs=5 has no effect with --method=ditto."),
        (
            {"method": "fml", "meme": "mlp", "fine_tune_epochs": 5},
            "--fine-tune-epochs=5 has no effect with --method=fml.",
        ),
        (
            {"method": "fedrep", "head_epochs": 1, "local_epochs": 5},
            "--local-epochs=5 has no effect with --method=fedrep.",
        ),
        ({"method": "fedgela", "neck": 1}, "--neck=1 has no effect: the method chooses the neck."),
        ({"method": "moon", "neck": 1, "projection": 8}, "--neck=1 has no effect: the method chooses the neck."),
        ({"method": "feddf", "public_samples": 64, "teacher_mode": "train"}, "--teacher-mode=train has no effect with"),
        (
            {"method": "feddf", "public_samples": 64, "average": "trained"},
            "--average has no effect with --form=server.",
        ),
        ({"method": "fccl", "public_samples": 64, "collaborate": False, "eps": 0.1}, "without --collaborate."),
        ({"method": "apfl", "alpha_lr": 0.1}, "--alpha-lr=0.1 has no effect with --adapt=never."),
        ({"method": "fedmd", "common_start": False}, "--common-start=0 has no effect with --average=never."),
        (
            {"method": "feddyn", "server_step": "none", "weighted_statistics": True},
            "--weighted-statistics=1 has no effect with --server-step=none.",
        ),
        ({"method": "fedmr", "terms": "intra", "lite": 2}, "--lite=2 has no effect with --terms=intra."),
        ({"method": "fedmr", "prototypes": "onehot", "submitters": 0.5}, "no effect with --prototypes=onehot."),
        ({"method": "fedgela", "classifier": "learned", "ew": 9.0}, "--ew=9 has no effect with --classifier=learned."),
        ({"focal_gamma": 3.0}, "--focal-gamma=3 has no effect with --loss=ce."),
        ({"lr_decay": 0.5}, "--lr-decay=0.5 has no effect without --lr-steps."),
        ({"data": "device", "data_memory": 100}, "--data-memory=100 has no effect with --data=device."),
        ({"task_split": "code"}, "--task-split=code has no effect without --task."),
        ({"track_every": 2}, "--track-every=2 has no effect without --track."),
        ({"track_local": False}, "--track-local=0 has no effect without --track."),
        ({"pretrain_batch_size": 64}, "--pretrain-batch-size=64 has no effect without --pretrain-epochs."),
        ({"lr_steps": "1,2,5", "rounds": 2}, "--lr-steps: a step after 2 or 5 of 2 rounds has no effect."),
        ({"profile": True, "rounds": 1}, "--profile has no effect on a single round"),
        ({"patience": 50}, "--patience=50 has no effect without --coordinator."),
        ({"public": "digits_public"}, "--public=digits_public has no effect with --method=fedavg."),
        ({"public_samples": 64}, "--public-samples=64 has no effect with --method=fedavg."),
        ({"method": "feddf", "public_batch": 64}, "--public-batch=64 has no effect with --method=feddf."),
    ],
)
def test_an_option_that_another_option_disables_is_said_to_have_no_effect(tmp_path, capsys, options, sentence):
    assert sentence in advice_on(tmp_path, capsys, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"method": "feddf", "public_samples": 64},
        {"method": "fedmd", "public_samples": 64, "public_batch": 32, "transfer_epochs": 1, "pretrain_batch_size": 64},
        {"method": "fccl", "public_samples": 64, "pretrain_epochs": 1, "pretrain_batch_size": 64},
        {"track": "angles", "track_every": 2, "track_local": False},
        {"method": "moon", "neck": 1, "momentum": 0.9, "optimizer_state": "kept", "fine_tune_epochs": 5},
        {"optimizer": "adam", "optimizer_state": "kept"},
        {"method": "fedgela", "neck": 1, "layers": 1, "ew": 9.0},
        {"method": "fedmr", "lite": 2, "mu1": 0.1, "submitters": 0.5},
    ],
)
def test_an_option_that_is_used_is_not_said_to_have_no_effect(tmp_path, capsys, options):
    assert "no effect" not in advice_on(tmp_path, capsys, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("bn", ["local", "local-layers", "group"])
def test_bn_is_said_to_have_no_effect_on_a_model_without_such_norms(tmp_path, capsys, bn):
    sentence = f"warning: --bn={bn} has no effect: the model has no such norms.\n"
    assert advice_on(tmp_path / "without", capsys, model="mlp", bn=bn) == sentence
    assert advice_on(tmp_path / "with", capsys, model="resnet8_stride2", bn=bn) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedgela", "fedrod"])
def test_local_layers_are_said_to_make_ga_a_mean_of_personal_answers(tmp_path, capsys, method):
    assert "ga_server_average" in advice_on(tmp_path, capsys, method=method, model="resnet8_stride2", bn="local-layers")


def test_a_quiet_run_prints_its_warnings_alone(tmp_path, capsys):
    options = {"method": "scaffold", "momentum": 0.9, "step_normaliser": "steps"}
    loud, quiet = (advice_on(tmp_path / str(q), capsys, **options, quiet=q) for q in (False, True))
    assert quiet == loud != ""


def test_good_settings_need_no_advice(tmp_path, capsys):
    assert advice_on(tmp_path, capsys, method="scaffold", momentum=0.0) == ""
