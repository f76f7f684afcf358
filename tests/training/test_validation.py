"""--validation and --select-on: samples that are kept out of training, and the rounds that they choose."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_pcdd as fp
from fedjax_pcdd.api import records
from fedjax_pcdd.api.runs import run
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation, hold_out
from fedjax_pcdd.data.lists import Lists, class_counts, save_partition
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.accuracies import further
from fedjax_pcdd.training.build import federate
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.metrics import History, balanced

SHORT = {"rounds": 2, "local_epochs": 1, "batch_size": 20, "lanes": 1, "fine_tune_epochs": 0}


def federation(sizes, classes=3, seed=0):
    y = np.random.default_rng(seed).integers(0, classes, sum(sizes))
    x = np.zeros((len(y), 1, 1, 1), np.uint8)
    lists = tuple(np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]))
    return Federation(Dataset("tiny", x, y, x, y, classes), fp.Partition(lists, lists))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.sampled_from([0.1, 0.25, 0.5]), st.integers(0, 99))
def test_each_class_of_each_client_gives_its_share_to_within_one_sample(sizes, share, seed):
    whole = federation(sizes, seed=seed)
    split = hold_out(whole, share, seed)
    y = whole.dataset.y_train
    validation_counts, train_counts = (class_counts(y, lists, 3) for lists in (split.validation, split.partition.train))
    np.testing.assert_array_equal(validation_counts + train_counts, whole.class_counts)
    assert (np.abs(validation_counts - share * whole.class_counts) <= 1).all()
    np.testing.assert_array_equal(validation_counts.sum(1), np.floor(share * whole.sizes + 0.5))
    assert not np.intersect1d(split.validation.flat, split.partition.train.flat).size


def test_the_seed_decides_which_samples_are_held_out():
    drawn, again, other = (hold_out(federation([40, 40]), 0.5, seed).validation.flat for seed in (3, 3, 4))
    assert (drawn == again).all()
    assert (drawn != other).any()


def test_a_share_that_leaves_a_client_no_training_sample_is_refused():
    with pytest.raises(UserError, match=r"validation=0\.6 leaves client 1 without a training sample: lower it"):
        hold_out(federation([5, 1]), 0.6, 0)


def test_samples_that_are_dealt_twice_cannot_be_held_out():
    digits = sources.load("digits")
    options = {"num_classes": 10, "clients": 5, "seed": 0, "classes_per_client": 2, "doubled": True}
    with pytest.raises(UserError, match="dealt twice: drop doubled, or give each sample to one client once"):
        hold_out(Federation(digits, partition("pcdd", digits.y_train, digits.y_test, **options)), 0.1, 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"select_on": "validation"}, "needs validation samples"),
        ({"validation": 1.0}, "validation"),
        ({"validation": 0.1, "task": "digits_domains"}, "clients with one architecture"),
    ],
)
def test_validation_options_without_a_meaning_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        build(options)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedgela", "fedproto"])
def test_accuracies_on_validation_samples_are_those_of_the_models(method):
    whole = fp.partition(sources.load("digits"), "iid", clients=3)
    history = fp.simulate(whole, method, validation=0.2, **SHORT)
    row, split = history.rows[-1], hold_out(whole, 0.2, 0)
    assert 0 <= row["pa_validation"] <= 1
    if method == "fedavg":
        outputs = history.outputs(split.dataset.x_train[split.validation.flat])
        predicted = np.argmax(np.asarray(outputs.logits), -1)
        labels = split.dataset.y_train[split.validation.flat]
        assert row["ga_validation"] == pytest.approx(np.mean(predicted == labels))
        predicted_tests = np.argmax(np.asarray(history.outputs(split.dataset.x_test).logits), -1)
        assert row["ga"] == pytest.approx(np.mean(predicted_tests == split.dataset.y_test))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fccl", "fedmd", "rcfl", "fedmatch"])
def test_clients_that_exchange_answers_are_measured_on_validation_samples_too(method):
    whole = fp.partition(sources.load("digits"), "pcdd", clients=5, classes_per_client=2)
    history = fp.simulate(whole, method, validation=0.2, **SHORT)
    row, split = history.rows[-1], hold_out(whole, 0.2, 0)
    images, labels = (x[split.validation.flat] for x in (split.dataset.x_train, split.dataset.y_train))
    correct = np.array(
        [np.argmax(np.asarray(history.outputs(images, client=k).logits), -1) == labels for k in range(5)]
    )
    assert row["ga_validation"] == pytest.approx(correct.mean())
    owners = np.repeat(np.arange(5), split.validation.sizes)
    own_accuracies = [correct[k, owners == k].mean() for k in range(5)]
    assert row["pa_validation"] == pytest.approx(np.mean(own_accuracies))


def test_several_architectures_refuse_validation_samples():
    whole = fp.partition(sources.load("digits"), "iid", clients=2)
    with pytest.raises(UserError, match="one architecture"):
        fp.simulate(whole, "fedmd", models="mlp,mcmahan_cnn", validation=0.2, **SHORT)
    with pytest.raises(UserError, match="one architecture"):
        fp.simulate(whole, "fedmd", model=["mlp", "mcmahan_cnn"], validation=0.2, **SHORT)


@pytest.mark.thorough
def test_a_run_records_validation_and_its_best_round_is_chosen_by_it(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(records, "draw_curves", lambda rows, path, title, best: drawn.update(best))
    options = {"rounds": 4, "validation": 0.2, "select_on": "validation", "clients": 3, "lr": 0.1, "quiet": True}
    run(*build(SHORT | options | {"run_dir": tmp_path / "run"}))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    chosen = max(rows, key=lambda row: row["ga_validation"])
    assert summary["selected_on"] == "validation"
    assert (summary["ga_best"], summary["ga_best_round"]) == (chosen["ga"], chosen["round"])
    assert summary["ga_validation_best"] == chosen["ga_validation"]
    assert drawn == {"ga": chosen["round"], "pa": max(rows, key=lambda row: row["pa_validation"])["round"]}
    assert {"validation", "train"} <= set(np.load(tmp_path / "run/partition.npz"))


def test_a_saved_partition_gives_its_validation_samples_if_asked_for(tmp_path):
    file = tmp_path / "lists.npz"
    whole = federate(build({"clients": 4, "beta": 1.0, "validation": 0.3})[0])
    save_partition(whole.partition, file, {"validation": whole.validation})
    options = {"partition": str(file)}
    reloaded = federate(build(options | {"validation": 0.3})[0])
    np.testing.assert_array_equal(reloaded.validation.flat, whole.validation.flat)
    np.testing.assert_array_equal(reloaded.sizes, whole.sizes)
    without = federate(build(options)[0])
    assert without.validation is None
    np.testing.assert_array_equal(without.sizes, whole.sizes + whole.validation.sizes)
    assert sorted(without.partition.train.flat) == sorted([*whole.partition.train.flat, *whole.validation.flat])
    with pytest.raises(UserError, match=r"keeps 0\.3 of its samples for validation, not 0\.1: use validation=0\.3"):
        federate(build(options | {"validation": 0.1})[0])


@pytest.mark.parametrize(
    ("validation", "sentence"),
    [
        (Lists([0, 1], [1, 1]), "4 clients need as many validation lists, not 2"),
        (Lists([0, 1, 2, 100_259], [1] * 4), "has train sample 100259"),
        (Lists([0, 1, 2, -1], [1] * 4), "has train sample -1"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"validation": 0.3}])
def test_damaged_validation_lists_are_refused(tmp_path, validation, sentence, options):
    file = tmp_path / "lists.npz"
    save_partition(federate(build({"clients": 4, "beta": 1.0})[0]).partition, file, {"validation": validation})
    with pytest.raises(UserError, match=sentence):
        federate(build(options | {"partition": str(file)})[0])


@pytest.mark.parametrize("options", [{}, {"train_samples": 700}, {"train_samples": 700, "seed": 1}])
def test_the_partition_of_a_run_is_refused_for_other_samples(tmp_path, options):
    made_with = {"train_samples": 800, "seed": 0}
    whole = federate(build({"clients": 4, "beta": 1.0, **made_with})[0])
    whole.save(tmp_path / "lists.npz")
    again = federate(build({"partition": str(tmp_path / "lists.npz"), **made_with})[0])
    np.testing.assert_array_equal(again.partition.train.flat, whole.partition.train.flat)
    with pytest.raises(UserError, match=r"was made for other labels \(800 training and 355 test samples; here are"):
        federate(build({"partition": str(tmp_path / "lists.npz"), **options})[0])


@pytest.mark.thorough
def test_validation_samples_that_a_federation_has_are_recorded_and_used():
    options = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "model": "mlp"}
    plain = fp.partition(fp.load_dataset("digits"), clients=4, beta=1.0)
    first = fp.simulate(plain, validation=0.1, **options)
    repeated = fp.simulate(first.federation, select_on="validation", **options)
    assert repeated.config.validation == pytest.approx(0.1, abs=0.01)
    assert repeated.summary["selected_on"] == "validation"
    assert repeated.ga.tolist() == first.ga.tolist()
    with pytest.raises(UserError, match=r"keeps 0\.0999 of its samples for validation, not 0\.5"):
        fp.simulate(first.federation, validation=0.5, **options)


def test_the_first_round_of_the_best_validation_accuracy_is_chosen():
    rows = [
        {"round": i + 1, "ga": g, "ga_validation": v} for i, (g, v) in enumerate([(0.5, 0.4), (0.3, 0.6), (0.9, 0.6)])
    ]
    assert History(rows, select_on="validation").best("ga") == (0.3, 2)
    assert History(rows).best("ga") == (0.9, 3)


def test_of_rounds_that_are_equal_but_for_rounding_the_first_is_chosen():
    first, later = np.mean([0.3, 0.2, 0.1]), np.mean([0.1, 0.2, 0.3])
    assert first < later
    rows = [{"round": 1, "pa": 0.9, "pa_validation": first}, {"round": 2, "pa": 0.5, "pa_validation": later}]
    assert History(rows, select_on="validation").best("pa") == (0.9, 1)


@pytest.mark.parametrize(("select_on", "best"), [("validation", 0.5), ("test", 0.9)])
def test_pa_under_a_protocol_is_that_of_the_round_that_validation_chose(select_on, best):
    pairs = enumerate([(0.9, 0.4), (0.5, 0.6)])
    rows = [{"round": i + 1, "pa": p, "pa_received": p, "pa_validation": v} for i, (p, v) in pairs]
    assert History(rows, select_on=select_on).best("pa_received")[0] == best


def test_the_round_of_the_best_pa_is_chosen_by_validation_samples_too():
    rows = [{"round": i + 1, "pa": p, "pa_validation": v} for i, (p, v) in enumerate([(0.5, 0.7), (0.9, 0.6)])]
    assert History(rows, select_on="validation").best("pa") == (0.5, 1)


def test_ga_of_further_models_counts_no_validation_samples():
    split = hold_out(federation([8, 12]), 0.25, 0)
    correct = {"cloud": np.array([[2, 3, 5, 1, 1, 1]])}  # of three classes, on tests and on validation samples
    assert further(SimpleNamespace(federation=split), correct) == {"ga_cloud": 0.5}


def test_balanced_accuracy_is_the_mean_recall_of_the_classes_that_occur():
    assert balanced(np.array([8, 1, 0]), np.array([10, 2, 0])) == pytest.approx(0.65)


@pytest.mark.parametrize("options", [{"lost_share": 0.5}, {"availability": "model"}])
def test_clients_that_exchange_answers_refuse_dropout_and_availability(tmp_path, capsys, options):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["--method=fedmd", "--clients=3", "--rounds=1", *arguments, f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "are always there" in capsys.readouterr().err


def test_a_task_refuses_calibration(tmp_path, capsys):
    arguments = ["--task=digits_domains", "--method=fedavg", "--models=mlp", "--calibrate=ccvr", "--rounds=1"]
    assert main([*arguments, f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "not for a task" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_configuration_of_a_run_with_a_method_from_a_file_is_a_preset(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import fedjax_pcdd as fp\nfrom flax import struct\n\n\n@struct.dataclass\nclass Own(fp.Method):\n    pass\n"
    )
    arguments = ["--rounds=1", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--clients=3"]
    assert main([f"--method={tmp_path}/mine.py:Own", *arguments, f"--run-dir={tmp_path / 'a'}"]) == 0
    assert main([f"--preset={tmp_path}/a/config.yaml", f"--run-dir={tmp_path / 'b'}"]) == 0
    rows = [(tmp_path / folder / "metrics.jsonl").read_text().split('"seconds"')[0] for folder in "ab"]
    assert rows[0] == rows[1]


def test_a_task_refuses_an_augmentation(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def same(images, key):\n    return images\n")
    arguments = ["--task=digits_domains", "--method=fedavg", "--rounds=1", f"--augmentation={tmp_path}/mine.py:same"]
    assert main([*arguments, f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "drop --augmentation" in capsys.readouterr().err
