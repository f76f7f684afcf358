"""The command line: options that it accepts and refuses, presets, and continued runs."""

import io
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import commands
import pytest

from fedjax_pcdd import methods
from fedjax_pcdd.api import runs as api_runs
from fedjax_pcdd.cli import help, messages
from fedjax_pcdd.cli import options as cli
from fedjax_pcdd.cli import run as cli_run
from fedjax_pcdd.cli.report import ReportOptions
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.domains import TASKS
from fedjax_pcdd.data.sources import DATASETS
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.fedmr import FedMR
from fedjax_pcdd.models import MODELS
from fedjax_pcdd.training import options
from fedjax_pcdd.training.config import RUN, RunConfig, dump
from fedjax_pcdd.training.fields import bounds, options_of
from fedjax_pcdd.training.lock import Lock
from fedjax_pcdd.training.presets import preset_values, read_preset


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The runs that the command asked for, as (config, method), none of which is run; the working folder is empty."""
    requested = []
    monkeypatch.setattr(api_runs, "run", lambda config, method, *_, **__: requested.append((config, method)) or {})
    monkeypatch.chdir(tmp_path)
    return requested


def parse(*argv):
    return commands.parse(argv)


def refusal(capsys, *argv):
    """The one sentence on stderr for arguments that must be refused."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.strip()


def test_without_arguments_fedavg_runs_on_digits(runs):
    assert main(["--quiet"]) == 0
    [(config, method)] = runs
    assert (config.method, config.dataset, method) == ("fedavg", "digits", METHODS["fedavg"]())


def test_the_run_folder_is_chosen_before_the_run(runs):
    main(["--quiet"])
    assert runs[0][0].run_dir == Path("runs/fedavg-digits-dirichlet0.1-s0")


@pytest.mark.parametrize("of_another", ["run", "lock"])
def test_commands_that_begin_at_once_write_to_folders_of_their_own(tmp_path, monkeypatch, of_another):
    monkeypatch.chdir(tmp_path)
    choose, chosen = cli_run.run_folder, []

    def choose_before_another_command(config):
        chosen.append(choose(config))
        if len(chosen) == 1:
            chosen[0].mkdir(parents=True)
            if of_another == "run":
                (chosen[0] / "config.yaml").write_text("method: fedavg")
            else:
                opened.enter_context(Lock.take(chosen[0] / "lock"))
        return chosen[-1]

    monkeypatch.setattr(cli_run, "run_folder", choose_before_another_command)
    with ExitStack() as opened:
        assert main(["--rounds=1", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--quiet"]) == 0
    assert [path.name for path in chosen] == [f"fedavg-digits-dirichlet0.1-s0{end}" for end in ("", "-2")]
    assert (chosen[1] / "summary.json").is_file()


def test_a_warning_of_the_package_is_one_line_and_others_name_file_and_line():
    lines = []

    def work(argv):
        assert argv == ["--lanes=2"]
        for file in (messages.__file__, "/elsewhere.py"):
            lines.append(warnings.formatwarning("`lanes` are few.", UserWarning, file, 7))

    original = warnings.formatwarning
    assert messages.guarded(work, ["--lanes=2"]) == 0
    assert lines == ["--lanes are few.\n", "/elsewhere.py:7: UserWarning: `lanes` are few.\n"]
    assert warnings.formatwarning is original


def test_a_closed_pipe_on_stdout_causes_no_traceback(monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert messages.guarded(lambda _: print("the first of many lines"), []) == 141
    assert capfd.readouterr().err == ""


def test_a_folder_name_that_is_not_utf8_is_printed_unchanged(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    assert messages.guarded(lambda _: print(os.fsdecode(b"runs/\xff")), []) == 0
    assert out.buffer.getvalue() == b"runs/\xff\n"


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("/checkout/experiments/sweep.py", "python experiments/run.py"),
        ("/mine/train.py", "fedjax-pcdd run"),
        ("/venv/bin/fedjax-pcdd", "fedjax-pcdd run"),
        ("/experiments/fedjax-pcdd", "fedjax-pcdd run"),
    ],
)
def test_messages_name_a_command_as_it_was_called(monkeypatch, script, command):
    monkeypatch.setattr(sys, "argv", [script])
    assert messages.invocation("run") == command


def test_an_interrupt_without_a_message_says_that_the_command_continues(capsys):
    def work(argv):
        raise KeyboardInterrupt

    assert messages.guarded(work, []) == 130
    assert capsys.readouterr().err == "stopped; the same command continues.\n"


def test_an_os_error_that_names_no_file_is_raised():
    def work(argv):
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate memory"):
        messages.guarded(work, [])


def test_run_options_and_hyperparameters_can_be_mixed():
    config, method = parse("--method=fedmr", "--beta=0.5", "--mu1=0.2")
    assert (config.beta, method) == (0.5, FedMR(mu1=0.2))


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch-size=7"],
        ["--batch_size=7"],
        ["--batch-size", "7"],
        ["--batch_size", "7"],
        ["--batch-size=3", "--batch-size=7"],
    ],
)
def test_an_option_can_be_spelled_in_several_ways(argv):
    assert parse(*argv)[0].batch_size == 7


@pytest.mark.parametrize(
    ("argv", "value"),
    [(["--quiet"], True), (["--no-quiet"], False), (["--quiet=true"], True), (["--quiet=False"], False)],
)
def test_a_switch_can_be_spelled_in_several_ways(argv, value):
    assert parse(*argv)[0].quiet is value


def test_a_switch_takes_no_following_word():
    assert parse("--quiet", "--no-retry", "--lr", "0.5")[0] == RunConfig(quiet=True, retry=False, lr=0.5)


@pytest.mark.parametrize(
    ("argument", "field", "value"),
    [
        ("--lanes=4", "lanes", 4),
        ("--lanes=auto", "lanes", "auto"),
        ("--grad-clip=20", "grad_clip", 20.0),
        ("--grad-clip=none", "grad_clip", "none"),
        ("--cohort=none", "cohort", None),
        ("--cohort=5", "cohort", 5),
        ("--data-dir=a b", "data_dir", Path("a b")),
        ("--weight-decay=1e-5", "weight_decay", 1e-5),
        ("--seed=4294967295", "seed", 2**32 - 1),
    ],
)
def test_values_get_their_types(argument, field, value):
    parsed = getattr(parse(argument)[0], field)
    assert (parsed, type(parsed)) == (value, type(value))


def test_a_file_may_have_a_comma_in_its_name():
    assert parse("--partition=lists,mine.npz")[0].partition == "lists,mine.npz"


def test_server_optimizer_is_for_the_command_line_alone_and_may_be_none(capsys):
    with pytest.raises(UserError, match=r"is written as a suffix here: method=fedavg\+adam"):
        options.configure({"server_optimizer": "adam"})
    assert parse("--preset=fedgela/table3", "--split=isic2019-natural", "--server-optimizer=none")[0].method == "fedavg"
    assert main(["--preset=fedmr/table1", "--server-optimizer=adam", "--help"]) == 0
    assert "--server-optimizer" in capsys.readouterr().out


def test_a_server_optimizer_is_another_way_to_write_a_suffix():
    for argv, name in [
        (["--server-optimizer=adam"], "fedavg+adam"),
        (["--method=fedgela", "--server-optimizer=yogi", "--server-lr=0.1"], "fedgela+yogi"),
        (["--method=fedgela", "--server-optimizer=none"], "fedgela"),
        (["--server-optimizer=ADAM"], "fedavg+adam"),
        (["--preset=fedmr/table1", "--split=P5C2", "--method=FedMR", "--server-optimizer", "avgm"], "fedmr+avgm"),
    ]:
        config, method = parse(*argv)
        assert config.method == name
        assert type(method) is methods.get(name)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--method=fedgela --mu1=1", "--mu1 belongs to fedmr, not to fedgela: drop it or use --method=fedmr."),
        ("--method=fedgela --mu1 1", "--mu1 belongs to fedmr, not to fedgela: drop it or use --method=fedmr."),
        ("--batch-szie=5", "there is no option --batch-szie: did you mean '--batch-size'?"),
        ("--bta 5 --lr 1", "there is no option --bta: did you mean '--beta'?"),
        ("--method=fedavg,fedprox", "there is no method 'fedavg,fedprox': several are for a sweep."),
        ("--seed=0:3", "--seed takes an integer, not '0:3': several values are for a sweep."),
        ("--zzzz", "there is no option --zzzz: --help lists them all."),
        ("--method=fedgella", "there is no method 'fedgella': did you mean 'fedgela'?"),
        ("--method=", "there is no method '': choose one of"),
        ("--rounds=many", "--rounds takes an integer, not 'many'."),
        ("--rounds=1e3", "--rounds takes an integer, not '1e3'."),
        ("--rounds=", "--rounds takes an integer, not ''."),
        ("--lr=fast", "--lr takes a number, not 'fast'."),
        ("--partition=dirichle", "unknown partition 'dirichle': did you mean 'dirichlet'?"),
        ("--lanes=some", "--lanes takes auto or an integer, not 'some'."),
        ("--grad-clip=all", "--grad-clip takes method, none or a number, not 'all'."),
        ("--quiet=maybe", "--quiet takes true or false, not 'maybe'."),
        ("--no-quiet=1", "--no-quiet takes no value: write --no-quiet alone."),
        ("--lr", "--lr needs a value: write --lr=VALUE."),
        ("--lr --quiet", "--lr needs a value: write --lr=VALUE."),
        ("fedavg", "unexpected 'fedavg': options are written --name=value."),
        ("--", "unexpected '--': options are written --name=value."),
        ("-x", "unexpected '-x': options are written --name=value."),
        ("--lr=nan", "--lr must be a finite number, not nan."),
        ("--lr=1e999", "--lr must be a finite number, not inf."),
        ("--lr -1", "--lr must be above 0, not -1."),
        ("--momentum=1", "--momentum must be at least 0 and below 1, not 1."),
        ("--keep=1", "--keep must be at least 2, not 1."),
        ("--cohort=11", "--cohort=11 is more than the 10 clients: lower it or raise them."),
        ("--method=fedmr --mu2=-1", "--mu2 must be at least 0, not -1."),
        ("--method=fedmr --mu2=inf", "--mu2 must be a finite number, not inf."),
        ("--method=fedmr --submitters=1.5", "--submitters must be at least 0 and at most 1, not 1.5."),
        ("--method=fedgela --layers=3", "--layers takes 0, 1 or 2, not '3'."),
        ("--split=P5C2", "--split chooses a split of a preset: add --preset, or drop it."),
        ("--preset=fedmr/tabel1", "there is no preset 'fedmr/tabel1': did you mean 'fedmr/table1'?"),
        ("--resume=nowhere", "there is no folder nowhere: name the folder of a run."),
        ("--resume=.", ". holds no config.yaml, so it is not a run: name the folder of one."),
        ("--resume=. --split=a", "--resume continues a run as it was started: drop --split."),
        ("--resume=. --variant=a", "--resume continues a run as it was started: drop --variant."),
        ("--resume=. --server-optimizer=adam", "--resume continues a run as it was started: drop --server-optimizer."),
        ("--server-optimizer=admm", "--server-optimizer knows no 'admm': did you mean 'adam'?"),
        ("--lr-steps=1,,2", "--lr-steps=1,,2 must be rising round numbers with commas between them, as 40,80."),
        ("--server-optimizer=adam,none", "there is no method 'fedavg+adam,fedavg': several are for a sweep."),
        ("--server-optimiser=adam", "there is no option --server-optimiser: did you mean '--server-optimizer'?"),
        (
            "--method=ccvr --server-optimizer=adam",
            "--method=ccvr+adam does not exist: ccvr has rounds that train nothing",
        ),
        ("--server-optimizer", "--server-optimizer needs a value: write --server-optimizer=VALUE."),
        ("--preset=fedmr/table1 --server-optimizer=adam", "--server-optimizer goes with a method: add --method"),
        ("--method=fedper --server-optimizer=adam", "--method=fedper+adam does not exist: fedper is not a method"),
    ],
)
def test_a_mistake_is_one_sentence(runs, capsys, argv, sentence):
    assert refusal(capsys, *argv.split()).startswith(sentence)
    assert runs == []


def test_a_mistake_found_by_the_runner_is_one_sentence(runs, capsys, monkeypatch):
    def refuse(*_, **__):
        raise UserError("the model is too narrow.")

    monkeypatch.setattr(api_runs, "run", refuse)
    assert refusal(capsys) == "the model is too narrow."


def test_an_interrupt_says_how_to_continue(runs, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api_runs, "run", interrupt)
    assert main(["--run-dir=here"]) == 130
    assert capsys.readouterr().err == "stopped; nothing was written\n"
    Path("here").mkdir()
    Path("here/config.yaml").touch()
    assert main(["--run-dir=here"]) == 130
    assert capsys.readouterr().err == "stopped; continue with --resume=here\n"


@pytest.mark.parametrize("method", METHODS)
def test_the_help_shows_every_option_of_the_method(capsys, method):
    assert main([f"--method={method}", "--help"]) == 0
    help_text = capsys.readouterr().out.replace(",", " ")
    assert "`" not in help_text  # fields are written as options
    options = [*RUN.values(), *options_of(METHODS[method]).values()]
    assert [option.name for option in options if f"{cli.flag(option.name)} " not in help_text] == []


def test_the_help_shows_symbol_bounds_and_default(capsys):
    main(["--method=fedmr", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "mu_2: weight of the inter-class loss [at least 0] (default: 0.0001)" in words


def test_the_help_shows_a_default_of_zero_and_no_negated_list_option(capsys):
    assert main(["-h"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith("usage: ")
    assert "--seed INT" in words
    assert "(default: 0) --" in words
    assert "--list-methods list the methods and exit --" in words
    assert "--no-list-methods" not in words


@pytest.mark.parametrize(("columns", "width"), [("20", 60), ("90", 90), ("400", 120)])
def test_the_help_is_as_wide_as_the_terminal_within_bounds(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.width() == width


def test_the_help_names_its_method_and_all_others():
    fedavg_help, fedmr_help = (" ".join(help.help_text(name).split()) for name in ("fedavg", "fedmr"))
    assert "The method is fedavg (the default), which has no options of its own;" in fedavg_help
    assert "The method is fedmr, whose options are in the last group;" in fedmr_help
    for method, text in (("fedavg", fedavg_help), ("fedmr", fedmr_help)):
        other_methods = text.partition("those of another: ")[2].partition(". ")[0].split(", ")
        assert other_methods == [name for name in METHODS if name != method]
    assert fedavg_help.count("--batch-size INT") == 1


def test_the_help_shows_no_option_of_another_method(capsys):
    main(["--help", "--method", "fedgela"])
    help_text = capsys.readouterr().out
    assert "--mu1" not in help_text
    assert "fedmr" in help_text


@pytest.mark.parametrize(("option", "registry"), [("methods", METHODS), ("datasets", DATASETS), ("models", MODELS)])
def test_lists_show_every_name(capsys, monkeypatch, option, registry):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([f"--list-{option}"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(registry)
    assert max(map(len, lines)) <= 80


def test_the_method_list_has_a_line_for_each_method_with_upload_and_paper(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["--list-methods"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(METHODS)
    line = next(line for line in lines if line.startswith("fedmr"))
    assert "TMLR 2023" in line
    assert "P + C D + C" in line


def test_the_list_of_tasks_names_the_participants(capsys):
    assert main(["--list-tasks"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert [name for name, task in TASKS.items() if ", ".join(task.domains) not in words] == []


def test_a_list_that_is_switched_off_is_not_shown(runs, capsys):
    assert main(["--no-list-methods", "--list-models=false", "--quiet"]) == 0
    assert len(runs) == 1


def test_a_paper_is_cut_to_the_room_in_its_line():
    assert help._cut("abcd efgh", 9) == "abcd efgh"
    assert help._cut("abcd efgh", 8) == "abcd ef…"
    assert help._cut("abcd efgh", 6) == "abcd…"


def test_a_command_gets_all_positional_arguments():
    received = []
    assert cli.command(ReportOptions, received.append, ["a", "--output=c", "b"], "fedjax-pcdd report") == 0
    assert received == [ReportOptions(runs=(Path("a"), Path("b")), output=Path("c"))]


@pytest.mark.parametrize("split", ["P5C2", "P10C2", "P10C3", "P10C5"])
def test_table_1_of_fedmr_has_the_partition_that_its_split_names(split):
    config, _ = parse("--preset=fedmr/table1", f"--split={split}")
    assert (config.partition, f"P{config.clients}C{config.classes_per_client}") == ("pcdd", split)


def test_a_preset_sets_the_tuned_loss_weights():
    assert parse("--preset=fedmr/table1", "--split=IID", "--method=fedmr")[1] == FedMR(mu1=0.01, mu2=1e-4)


def test_options_win_over_the_preset():
    config, method = parse(
        "--preset=fedgela/table2", "--split=full-dir0.5", "--method=fedgela", "--ew=25", "--beta=0.3"
    )
    assert (config.beta, config.rounds, method) == (0.3, 50, FedGELA(ew=25.0))


def test_a_preset_without_a_split_lists_its_splits(runs, capsys):
    assert "one of P5C2, P10C2, P10C3, P10C5, IID, svhn-P5C2," in refusal(capsys, "--preset=fedmr/table1")


def test_an_unknown_split_is_refused(runs, capsys):
    assert "no split 'P10C4'" in refusal(capsys, "--preset=fedmr/table1", "--split=P10C4")


PRESET = """
run: {method: fedprox, lr: 0.1, batch-size: 8}
splits: {a: {lr: 0.2}, b-c: {rounds: 3}}
methods: {fedprox: {mu: 0.3, momentum: 0.5, splits: {b-c: {mu: 0.4}}}}
"""


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("a", {"method": "fedprox", "lr": 0.2, "batch_size": 8, "mu": 0.3, "momentum": 0.5}),
        ("b-c", {"method": "fedprox", "lr": 0.1, "batch_size": 8, "rounds": 3, "mu": 0.4, "momentum": 0.5}),
    ],
)
def test_more_specific_parts_of_a_preset_win(tmp_path, split, expected):
    (tmp_path / "mine.yaml").write_text(PRESET)
    assert preset_values(read_preset("mine", tmp_path), "fedprox", split) == expected


def test_numbers_of_a_preset_are_those_of_the_command_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("run: {rounds: 010, lr: 1.5e-2, weight_decay: .5, momentum: 0, seed: 1_000}")
    written = ["--rounds=010", "--lr=1.5e-2", "--weight-decay=.5", "--momentum=0", "--seed=1_000"]
    assert parse(f"--preset={tmp_path / 'mine.yaml'}") == parse(*written)
    assert parse(*written)[0].rounds == 10


def test_a_preset_may_set_the_method(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(PRESET)
    assert parse(f"--preset={file}", "--split=a")[0].method == "fedprox"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("run: {lrr: 1}", "unknown key 'lrr' in FILE: did you mean 'lr'?"),
        ("run: {resume: x}", "unknown key 'resume' in FILE: "),
        ("rum: {lr: 1}\nsplits: {}", "unknown key 'rum' in FILE: did you mean 'run'?"),
        ("methods: {fedavgg: {}}", "unknown method 'fedavgg' in FILE: did you mean 'fedavg'?"),
        ("methods: {fedavg: {mu: 1}}", "unknown key 'mu' in method 'fedavg' of FILE: "),
        ("methods: {fedavg: {splits: {z: {}}}}\nsplits: {}", "'splits' of method 'fedavg' of FILE may name no other"),
        ("run: {lr: fast}", "'lr' in FILE takes a number, not 'fast'."),
        ("run: {seed: 1:4}", "'seed' in FILE takes an integer, not '1:4': several values are for a sweep."),
        ("run: {lr: 1:30.5}", "'lr' in FILE takes a number, not '1:30.5'"),
        ("run: {rounds: 0x10}", "'rounds' in FILE takes an integer, not '0x10'."),
        ("run: 3", "'run' in FILE must hold `name: value` lines, not '3'."),
        ("splits: [a]", "'splits' in FILE must name splits"),
        ("run: {lr: }", "'lr' in FILE takes a number, so it cannot be empty."),
        ("run: {", "FILE is not valid YAML at line"),
    ],
)
def test_a_wrong_preset_is_refused_in_one_sentence(runs, capsys, tmp_path, text, sentence):
    (tmp_path / "FILE").write_text(text)
    assert refusal(capsys, "--preset=FILE").startswith(sentence)


@pytest.fixture
def run_folder(runs, tmp_path):
    """A run folder as the runner leaves it."""
    folder = tmp_path / "old"
    folder.mkdir()
    config_and_method = RunConfig(method="fedmr", lr=0.05, seed=3, run_dir=folder, keep=4), FedMR(mu1=0.2)
    (folder / "config.yaml").write_text(dump(*config_and_method))
    return folder


def test_a_run_is_repeated_in_a_new_folder(run_folder):
    config, method = parse(f"--preset={run_folder}/config.yaml")
    assert (config, method) == (RunConfig(method="fedmr", lr=0.05, seed=3, keep=4), FedMR(mu1=0.2))


def test_a_run_is_repeated_with_another_method(run_folder):
    config, method = parse(f"--preset={run_folder}/config.yaml", "--method=fedavg")
    assert (config.method, config.lr, method) == ("fedavg", 0.05, METHODS["fedavg"]())


def test_a_run_is_continued_in_its_folder_with_its_options(run_folder):
    config, method = parse(f"--resume={run_folder}")
    assert (config.resume, config.run_dir, config.lr, method) == (run_folder, run_folder, 0.05, FedMR(mu1=0.2))


def test_a_run_whose_folder_was_moved_is_continued_where_it_is_now(run_folder, tmp_path):
    run_folder.rename(tmp_path / "new")
    config, _ = parse(f"--resume={tmp_path / 'new'}")
    assert (config.resume, config.run_dir) == (tmp_path / "new",) * 2


@pytest.mark.parametrize("own", [(), ("workers",)], ids=["run", "grid"])
def test_the_last_of_several_values_of_an_option_counts_where_options_take_lists_with_a_warning(capsys, own):
    words = ["--seed=1", "--lr=0.1", "--seed=2", "--lr=0.1", "--quiet", "--no-quiet"]
    assert cli.scan(words, own=own) == {"seed": "2", "lr": "0.1", "quiet": "false"}
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[:7] for line in errors] == [
        ["warning:", name, "is", "given", "more", "than", "once:"] for name in ("--seed", "--quiet") if own
    ]


def test_a_continued_run_may_change_options_that_affect_no_result(run_folder):
    config, _ = parse(f"--resume={run_folder}", "--quiet", "--keep=9", "--device=cpu", "--lr=0.05", "--method=fedmr")
    assert (config.quiet, config.keep, config.device) == (True, 9, "cpu")


def test_a_continued_run_may_track_further_quantities(run_folder):
    config, _ = parse(f"--resume={run_folder}", "--track=spectrum", "--track-every=5", "--no-track-local")
    assert (config.track, config.track_every, config.track_local) == ("spectrum", 5, False)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--lr=0.1"], "--lr was 0.05 in this run, not 0.1: resume without it, or start a new run with --run-dir."),
        (
            ["--mu1=0.1", "--seed=4"],
            "--seed was 3 in this run, not 4, --mu1 was 0.2 in this run, not 0.1: resume without",
        ),
        (["--method=fedavg"], "--method was fedmr in this run, not fedavg: resume without it"),
        (["--local-steps=5"], "--local-steps was None in this run, not 5: resume without it"),
        (["--ew=1"], "--ew belongs to fedgela, not to fedmr: drop it."),
        (["--run-dir=x"], "--resume continues a run as it was started: drop --run-dir."),
    ],
)
def test_a_continued_run_refuses_changed_options(run_folder, capsys, argv, sentence):
    assert refusal(capsys, f"--resume={run_folder}", *argv).startswith(sentence)


def test_a_damaged_config_of_a_run_is_refused(run_folder, capsys):
    (run_folder / "config.yaml").write_text("lr: [")
    assert "config.yaml is not valid YAML" in refusal(capsys, f"--resume={run_folder}")


@pytest.mark.parametrize("name", METHODS)
def test_every_bound_of_a_method_is_enforced(name, runs, capsys):
    for option in options_of(METHODS[name]).values():
        limits = ((option.low, -1), (option.above, 0), (option.high, 1), (option.below, 0))
        for value in [int(limit) + step for limit, step in limits if limit is not None]:
            sentence = refusal(capsys, f"--method={name}", f"{cli.flag(option.name)}={value}")
            assert f"must be {bounds(option)}" in sentence


@pytest.mark.thorough
def test_the_script_exits_with_the_code_of_the_command():
    script = Path(__file__).parents[2] / "experiments/run.py"
    completed = subprocess.run([sys.executable, script, "--lr=x"], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (2, "--lr takes a number, not 'x'.\n")


@pytest.mark.thorough
def test_mistakes_and_help_do_not_import_the_runner():
    code = (
        "import sys; from fedjax_pcdd.cli.run import main; main(['--help']); main(['--x=1']);"
        "sys.exit('fedjax_pcdd.api.runs' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_names_of_options_may_be_written_in_capitals():
    assert cli.scan(["--LR=0.1", "--BATCH-SIZE", "7", "--NO-RETRY"]) == {
        "lr": "0.1",
        "batch_size": "7",
        "retry": "false",
    }


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_what_cannot_be_printed_is_one_sentence(word):
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fedjax_pcdd", word]
        completed = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=commands.ROOT, env=buffered
        )
    assert completed.returncode == 2
    assert completed.stderr == "what is printed cannot be written (No space left on device): put that right.\n"
