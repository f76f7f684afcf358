"""Tasks by domain from the command line, on the built-in digits: a small run, its record, and refusals."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from commands import kill_after, parse, results, resumed, undisturbed
from in_memory import trained

from fedjax_pcdd.analysis.pictures import correlation_matrices, draw_matrices
from fedjax_pcdd.api import runs
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data import domains
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training import tasks
from fedjax_pcdd.training.build import public_outputs
from fedjax_pcdd.training.callbacks import as_callbacks
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.setup import Setup
from fedjax_pcdd.training.tasks import ParticipantSetup, TaskSetup, intra_and_inter

TINY = [
    "--task=digits_domains", "--rounds=2", "--pretrain-epochs=1", "--local-epochs=1", "--public-samples=64",
    "--public-batch=32", "--lanes=1", "--quiet",
]  # fmt: skip
OPTIONS = {"fml": ["--meme=mlp"], "feddf": ["--form=participants"]}


def run(folder, method, *options):
    """The summary of a small run in this process, all participants with an mlp."""
    argv = [*TINY, f"--method={method}", "--models=mlp", *options, f"--run-dir={folder}"]
    assert main(argv) == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def fccl(tmp_path_factory):
    """The folder of a run of FCCL."""
    folder = tmp_path_factory.mktemp("tasks") / "fccl"
    run(folder, "fccl")
    return folder


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_a_run_records_accuracies_within_and_between_domains(fccl):
    for row in rows_of(fccl):
        assert len(row["intra"]) == len(row["inter"]) == 4
        assert row["pa"] == row["intra_top1"] == pytest.approx(np.mean(row["intra"]))
        assert row["ga"] == row["inter_top1"] == pytest.approx(np.mean(row["inter"]))
        assert row["intra_top5"] > row["intra_top1"]
        assert row["pa_std"] == pytest.approx(np.std(row["intra"]))


@pytest.mark.thorough
@pytest.mark.parametrize("top", [1, 5])
def test_balanced_accuracies_are_mean_recalls_on_own_and_on_other_domains(top):
    options = {"method": "solo", "task": "digits_domains", "models": "mlp", "rounds": 1, "local_epochs": 1, "lanes": 1}
    run = trained(**options, pretrain_epochs=0, batch_size=32)
    correct, tests = run.simulation.domain_correct(run.state)[:, :, top // 5], run.federation.test_class_counts
    recalls = np.array([[np.mean(hits / sizes) for hits, sizes in zip(row, tests, strict=True)] for row in correct])
    own_recalls, other_recalls = np.diagonal(recalls), [np.delete(row, k).mean() for k, row in enumerate(recalls)]
    (row,) = run.history.rows
    if top == 5:
        tasks.DomainAccuracies("solo", top=5).measure(run, row, None)
    assert (row["pa_balanced"], row["ga_balanced"]) == pytest.approx((own_recalls.mean(), np.mean(other_recalls)))
    assert row["pa_balanced"] != row["pa"] == row[f"intra_top{top}"]


@pytest.mark.thorough
def test_the_local_objective_is_the_plain_mean_over_participants(tmp_path):
    argv, reports = [*TINY, "--method=fccl", "--models=mlp", f"--run-dir={tmp_path / 'run'}"], []
    runs.run(*parse(argv), callbacks=as_callbacks([lambda run, report: reports.append(report)]))
    means = [report.loss.mean() for report in reports]
    assert [row["local_objective"] for row in rows_of(tmp_path / "run")] == pytest.approx(means)


@pytest.mark.thorough
def test_a_participant_without_a_full_batch_is_not_in_the_local_objective(monkeypatch, tmp_path):
    recipe = domains.TASKS["digits_domains"]
    monkeypatch.setitem(domains.TASKS, "digits_domains", recipe._replace(private=(40, 9, 40, 40)))
    options, reports = ["--batch-size=20", "--last-batch=strict", "--rounds=1"], []
    argv = [*TINY, *options, "--method=solo", "--models=mlp", "--pretrain-epochs=0", f"--run-dir={tmp_path / 'run'}"]
    runs.run(*parse(argv), callbacks=as_callbacks([lambda run, report: reports.append(report)]))
    (report,), (row,) = reports, rows_of(tmp_path / "run")
    assert list(report.jobs.steps) == [2, 0, 2, 2]
    assert row["local_objective"] == pytest.approx(report.loss[[0, 2, 3]].mean())


@pytest.mark.thorough
def test_fedmd_may_begin_with_labelled_public_images(tmp_path):
    accuracies = {}
    for epochs in (0, 3):
        run(tmp_path / str(epochs), "fedmd", f"--transfer-epochs={epochs}", "--rounds=1", "--pretrain-batch-size=32")
        accuracies[epochs] = json.loads((tmp_path / str(epochs) / "start.json").read_text())["intra_top1"]
    assert accuracies[0] != accuracies[3]


def test_transfer_needs_the_labels_of_the_public_images(tmp_path, capsys):
    np.savez(tmp_path / "plain.npz", x=np.zeros((64, 16, 16, 3), np.uint8))
    options = ["--transfer-epochs=1", "--public=plain", f"--data-dir={tmp_path}", f"--run-dir={tmp_path / 'run'}"]
    assert main([*TINY, "--method=fedmd", "--models=mlp", *options]) == 2
    assert "'plain' has no labels" in capsys.readouterr().err


@pytest.mark.thorough
def test_other_labels_of_the_public_images_are_refused_on_resume(tmp_path, capsys):
    rng, labels = np.random.default_rng(0), np.arange(64) % 10
    data = {"x_train": rng.integers(0, 255, (64, 16, 16, 3), np.uint8)}
    np.savez(tmp_path / "plain.npz", **data, y_train=labels)
    options = ["--transfer-epochs=1", "--public=plain", f"--data-dir={tmp_path}", "--pretrain-batch-size=32"]
    run(tmp_path / "run", "fedmd", *options)
    np.savez(tmp_path / "plain.npz", **data, y_train=labels[::-1])
    assert main([f"--resume={tmp_path / 'run'}"]) == 2
    assert "the public labels of the run in" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_summary_names_the_domains_and_their_models(fccl):
    summary = json.loads((fccl / "summary.json").read_text())
    assert summary["dataset"] == "digits_domains"
    assert summary["domains"] == ["plain", "inverted", "rotated", "blurred"]
    assert summary["models"] == ["mlp"] * 4
    intra, inter = intra_and_inter(np.array(summary["domain_accuracy"]))
    np.testing.assert_allclose([intra, inter], [summary["intra"], summary["inter"]])
    intra, inter = (np.array([row[name] for row in rows_of(fccl)]) for name in ("intra", "inter"))
    assert summary["ga_best"] == pytest.approx(inter[intra.argmax(0), range(4)].mean())
    assert summary["compilations"] == 1


@pytest.mark.thorough
def test_correlations_are_written_where_there_are_public_images(fccl):
    saved = np.load(fccl / "correlation.npz")
    assert saved["matrices"].shape == (4, 10, 10)
    assert saved["participants"].tolist() == ["plain", "inverted", "rotated", "blurred"]
    assert (np.diagonal(saved["matrices"], axis1=1, axis2=2) > 0).mean() > 0.5
    assert (fccl / "correlation.png").stat().st_size > 0


def test_private_correlations_are_those_of_each_participant_on_its_own_images(tmp_path):
    rng = np.random.default_rng(0)
    images, own = rng.normal(size=(7, 3)), [np.array([0, 2, 4]), np.array([1, 3, 5, 6])]
    kernels = rng.normal(size=(2, 3, 4))
    run = SimpleNamespace(
        federation=SimpleNamespace(dataset=SimpleNamespace(x_train=images), partition=SimpleNamespace(train=own)),
        outputs=lambda x, client: SimpleNamespace(logits=x @ kernels[client]),
        simulation=SimpleNamespace(public=(), public_logits=lambda state: images @ kernels), state=None, error=None,
    )  # fmt: skip
    folder = SimpleNamespace(draw=lambda name, write: write(tmp_path / name) if name.endswith("npz") else None)
    tasks.Correlation(folder, ["art", "photo"]).on_end(run)
    private = np.load(tmp_path / "correlation.npz")["private"]
    for k, numbers in enumerate(own):
        np.testing.assert_allclose(private[k], correlation_matrices(images[numbers] @ kernels)[k], 1e-5, 1e-6)


@pytest.mark.thorough
def test_the_recorded_configuration_repeats_the_run(fccl, tmp_path):
    assert main([f"--preset={fccl}/config.yaml", f"--run-dir={tmp_path / 'again'}"]) == 0
    assert results(tmp_path / "again") == results(fccl)


@pytest.mark.thorough
def test_solo_runs_without_correlations(tmp_path):
    run(tmp_path / "run", "solo")
    assert not (tmp_path / "run" / "correlation.npz").exists()


@pytest.mark.thorough
def test_fedavg_runs_with_one_architecture(tmp_path):
    argv = [option for option in TINY if not option.startswith("--pretrain")]
    assert main([*argv, "--method=fedavg", "--models=mlp", f"--run-dir={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # With one common model, every participant has the same accuracy on a domain.
    columns = np.array(summary["domain_accuracy"])
    np.testing.assert_array_equal(columns, columns[:1].repeat(4, 0))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedmd", "fml", "rcfl", "feddf", "fedmatch"])
def test_the_other_methods_run_with_four_architectures(tmp_path, method):
    models = "--models=mlp,simple_cnn,mcmahan_cnn,fedrl_cnn"
    summary = run(tmp_path / "run", method, models, "--rounds=1", *OPTIONS.get(method, []))
    assert summary["models"] == models.removeprefix("--models=").split(",")
    assert (tmp_path / "run" / "correlation.npz").exists() == (method != "fml")


@pytest.mark.slow  # a killed task is among the faults of `.ci/run` too
@pytest.mark.parametrize("models", ["mlp", "mlp,simple_cnn"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, models):
    options = [*TINY, "--method=fccl", f"--models={models}", "--rounds=8"]
    expected = undisturbed(tmp_path / "whole", *options)
    kill_after(2, tmp_path / "killed", *options)
    assert resumed(tmp_path / "killed") == expected


BAD = {
    "unknown task": (["--task=digit_domains"], "digits_domains"),
    "unknown model": (["--models=mlp,simple_cn"], "simple_cnn"),
    "several models to average": (["--method=fedavg", "--models=mlp,simple_cnn"], "--models"),
    "several models for Ditto": (["--method=ditto", "--models=mlp,simple_cnn"], "name one in --models"),
    "several models for APFL": (["--method=apfl", "--models=mlp,simple_cnn"], "name one in --models"),
    "prototypes of several lengths": (["--method=fedtgp", "--models=mlp,simple_cnn"], "set --features"),
    "several models for FedDF on the server": (["--method=feddf", "--models=mlp,simple_cnn"], "--models"),
    "several models for an average": (["--method=fccl", "--average=trained", "--models=mlp,simple_cnn"], "--models"),
    "more models than participants": (["--models=mlp,mlp,mlp,mlp,mlp"], "--models"),
    "a model beside a task": (["--model=mlp"], "--models"),
    "a cohort": (["--cohort=2"], "--cohort"),
    "client state on the host": (["--client-state=host"], "--client-state"),
    "local statistics": (["--bn=local"], "--bn"),
    "missing files": (["--task=digits", "--data-dir=."], "mnist.npz"),
    "missing archive": (["--task=office_home", "--data-dir=."], "office_home.npz"),
    "unknown public images": (["--method=fccl", "--public=nothing", "--data-dir=."], "nothing"),
    "too many public images": (["--method=fccl", "--public-samples=99999"], "samples"),
    "pre-training of a common model": (["--method=fedavg", "--pretrain-epochs=3"], "--pretrain-epochs"),
    "fine-tuning in a task": (["--method=fedavg", "--fine-tune-epochs=3"], "--fine-tune-epochs"),
    "a partition beside a task": (["--beta=0.5"], "--beta"),
    "a data set beside a task": (["--dataset=mnist"], "--dataset"),
    "an unknown meme": (["--method=fml", "--meme=mpl"], "mlp"),
    "another split": (["--task-split=code"], "office_home"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_refused_in_one_sentence_and_leaves_no_files(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, word = BAD[case]
    assert main(["--task=digits_domains", "--method=solo", "--device=cpu", *options]) == 2
    message = capsys.readouterr().err
    assert word in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


WITHOUT_TASK = {
    "models of a common model": (["--method=fedavg", "--models=mlp"], "--model"),
    "models for Ditto": (["--method=ditto", "--models=mlp,simple_cnn"], "with --model, not --models"),
    "models for APFL": (["--method=apfl", "--models=mlp,simple_cnn"], "with --model, not --models"),
    "pre-training of a common model": (["--method=fedavg", "--pretrain-epochs=1"], "--pretrain-epochs"),
    "no public images": (["--method=fccl", "--dataset=mnist"], "mnist"),
    "model and models": (["--method=solo", "--models=mlp", "--model=mlp"], "--model"),
    "epochs of no task": (["--local-epochs=none"], "--local-epochs"),
}


@pytest.mark.parametrize("case", WITHOUT_TASK)
def test_a_mistake_without_a_task_is_refused_in_one_sentence_too(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, word = WITHOUT_TASK[case]
    assert main([*options, "--data-dir=."]) == 2
    message = capsys.readouterr().err
    assert word in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_participants_of_a_partition_exchange_too(tmp_path):
    argv = ["--method=fedmd", "--models=mlp", "--clients=3", "--rounds=1", "--local-epochs=1", "--public-samples=64"]
    assert main([*argv, "--public-batch=32", "--lanes=1", "--quiet", f"--run-dir={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["ga_last"] < 1
    assert 0 < summary["pa_last"] < 1


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("--task=digits_domains", TaskSetup),
        ("--method=fccl", ParticipantSetup),
        ("--method=feddf --form=participants", ParticipantSetup),
        ("--method=feddf", Setup),
        ("--method=solo", Setup),
        ("--method=solo --models=mlp", ParticipantSetup),
        ("--method=solo --pretrain-epochs=2", ParticipantSetup),
        ("--method=fccl --no-collaborate --average=trained", ParticipantSetup),
        ("--method=fccl --no-collaborate", Setup),
    ],
)
def test_the_kind_of_run_follows_from_the_options(monkeypatch, options, kind):
    config, method = parse(options.split())
    for setup_class in (Setup, ParticipantSetup, TaskSetup):
        monkeypatch.setattr(setup_class, "__init__", lambda *_: None)
    assert type(tasks.setup([(config, method)])) is kind


def test_a_task_brings_the_papers_settings():
    config, _ = parse(["--task=digits", "--method=fccl"])
    assert (config.rounds, config.batch_size, config.optimizer, config.lr) == (40, 512, "adam", 1e-3)
    assert (config.local_epochs, config.last_batch, config.weight_decay) == (None, "keep", 0.0)


def test_options_win_over_the_settings_of_a_task():
    config, _ = parse(["--task=digits", "--rounds=3", "--optimizer=sgd"])
    assert (config.rounds, config.optimizer, config.lr) == (3, "sgd", 1e-3)


class Stopped(Exception):
    pass


def groups_of(monkeypatch, tmp_path, *options):
    """The arguments with which a run would make its `Groups`."""
    arguments = {}

    def note(self, models, federation, method, local, **options):
        arguments.update(options, models=models, method=method, local=local)
        raise Stopped

    monkeypatch.setattr(Groups, "__init__", note)
    monkeypatch.chdir(tmp_path)
    config, method = parse(options)
    with pytest.raises(Stopped):
        runs.run(config, method)
    return arguments


@pytest.mark.thorough
def test_a_task_brings_the_epochs_of_its_domains_and_the_public_passes(monkeypatch, tmp_path):
    from fedjax_pcdd.data.domains import TASKS

    task = TASKS["digits_domains"]._replace(public_epochs=2, local_epochs=(7, 8, 9, 10))
    monkeypatch.setitem(TASKS, "digits_domains", task)
    arguments = groups_of(monkeypatch, tmp_path, "--task=digits_domains", "--method=fccl")
    assert (arguments["epochs"], arguments["method"].public_epochs) == ((7, 8, 9, 10), 2)
    arguments = groups_of(
        monkeypatch, tmp_path, "--task=digits_domains", "--method=fccl", "--local-epochs=3", "--public-epochs=1"
    )
    assert (arguments["epochs"], arguments["local"].epochs, arguments["method"].public_epochs) == (None, 3, 1)


@pytest.mark.thorough
def test_participants_have_four_architectures_unless_models_are_averaged(monkeypatch, tmp_path):
    arguments = groups_of(monkeypatch, tmp_path, "--task=digits_domains", "--method=fccl")
    assert len(set(arguments["models"])) == 4
    for options in (["--method=fedavg"], ["--method=feddf"], ["--method=fccl", "--average=exchanged"]):
        assert len(set(groups_of(monkeypatch, tmp_path, "--task=digits_domains", *options)["models"])) == 1


def test_fewer_architectures_than_participants_are_repeated(monkeypatch, tmp_path):
    arguments = groups_of(monkeypatch, tmp_path, "--task=digits_domains", "--method=solo", "--models=mlp,simple_cnn")
    first, second, *others = arguments["models"]
    assert first != second
    assert others == [first, second]


def test_public_images_and_their_batches_have_the_given_sizes(monkeypatch, tmp_path):
    arguments = groups_of(
        monkeypatch, tmp_path, "--task=digits_domains", "--method=fccl", "--public-samples=9", "--public-batch=4"
    )
    assert (arguments["public"].images.shape, arguments["public"].batch) == ((9, 16, 16, 3), 4)


@pytest.mark.parametrize(("options", "number"), [({}, 8), ({"public_epochs": 3}, 24), ({"consensus": "per_round"}, 9)])
def test_public_outputs_are_the_public_images_that_an_exchange_uses(options, number):
    config, method = build({"method": "fedmd", "public_samples": 9, "public_batch": 4, **options})
    assert public_outputs(config, method) == number
    groups = tasks.setup([(config, method)]).make(1)
    used = len(groups.images) if groups.traits.targets == "round" else groups.public_plan(1).size
    assert used == number


def test_tasks_are_listed(capsys):
    assert main(["--list-tasks"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith(" ")]
    assert shown == ["digits_domains", "digits2", "digits", "office_caltech10", "office_home"]


def test_the_help_has_a_group_for_tasks(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "task options" in shown
    assert "--pretrain-epochs" in shown


@pytest.mark.parametrize("method", ["rcfl", "fedmatch"])
def test_a_reconstruction_is_marked_wherever_it_is_listed(method, capsys):
    assert "reconstructed" in METHODS[method]().traits().paper
    main(["--list-methods"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(method))
    assert "reconstruct" in line
    main([f"--method={method}", "--help"])
    assert "reconstructed" in capsys.readouterr().out


@pytest.mark.thorough
def test_correlation_with_itself_is_one_less_one_over_the_batch():
    logits = np.random.default_rng(0).normal(size=(1, 12, 3))
    matrices = np.asarray(correlation_matrices(logits))
    np.testing.assert_allclose(np.diagonal(matrices[0]), 11 / 12, 1e-5)


@pytest.mark.thorough
def test_correlations_are_between_own_logits_and_mean_logits_by_class():
    logits = np.random.default_rng(1).normal(size=(3, 40, 4))
    matrices = np.asarray(correlation_matrices(logits))
    expected = np.corrcoef(logits[1].T, logits.mean(0).T)[:4, 4:] * 39 / 40
    np.testing.assert_allclose(matrices[1], expected, 1e-4, 1e-5)


def test_a_picture_of_one_participant_can_be_drawn(tmp_path):
    draw_matrices(np.zeros((1, 3, 3)), np.zeros((1, 3, 3)), ["art"], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 0


def test_the_own_domain_is_left_out_of_the_mean_over_the_others():
    intra, inter = intra_and_inter(np.array([[0.9, 0.1, 0.3], [0.2, 0.8, 0.4], [0.0, 0.5, 0.7]]))
    np.testing.assert_allclose(intra, [0.9, 0.8, 0.7])
    np.testing.assert_allclose(inter, [0.2, 0.3, 0.25])
