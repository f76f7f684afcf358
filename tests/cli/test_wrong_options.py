"""Options that cannot work: one sentence, quickly and without writing a file, for any option and any value."""

import contextlib
import io
import resource
import shlex
import subprocess
import sys

import pytest
from commands import ROOT, RUN, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.cli import main as commands_main
from fedjax_pcdd.cli.messages import guarded
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training.config import RUN as OPTIONS
from fedjax_pcdd.training.fields import options_of

WRONG = ["--devices=1000", "--lr-steps=5,3", "--lr-steps=-1", "--coordinator=foo", "--run-dir=", "--rounds=99999999999",
         "--clients=1000000000", "--lr=1e39", "--beta=nan"]  # fmt: skip


@pytest.mark.parametrize("argument", [*WRONG, "--budget-minutes=nan", "--mu1=nan"])
def test_an_option_that_cannot_work_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, argument):
    monkeypatch.chdir(tmp_path)
    assert main(["--method=fedmr", argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert argument.partition("=")[0] in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sweep --workers", "--workers needs a value: write --workers=VALUE."),
        ("sweep --method=fedprox --mu", "--mu needs a value: write --mu=VALUE."),
        ("search --trials --lr=0.1,0.2", "--trials needs a value: write --trials=VALUE."),
        ("report runs --output", "--output needs a value: write --output=VALUE."),
        ("leaderboard --plan", "--plan needs a value: write --plan=VALUE."),
        ("analyse angles runs --output", "--output needs a value: write --output=VALUE."),
        ("sweep --worker=2", "there is no option --worker: did you mean '--workers'?"),
        ("search --trial=3", "there is no option --trial: did you mean '--trials'?"),
        ("sweep --seeds=1,2", "there is no option --seeds: did you mean '--seed'?"),
        ("report runs --row=method", "there is no option --row: did you mean '--rows'?"),
        ("analyse angles runs --outpt", "there is no option --outpt: did you mean '--output'?"),
        ("analyse grid runs --output=a.png", "grid has no option --output: it has none."),
        ("report ''", "an argument is empty: name what it stands for, or leave it out."),
    ],
)
def test_every_command_knows_its_own_options(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert commands_main.main(shlex.split(words)) == 2
    assert capsys.readouterr().err == f"{sentence}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_value_that_is_wrong_by_itself_is_refused_before_jax_is_loaded():
    code = """
import sys
from fedjax_pcdd.cli.run import main
codes = [main(["--method=fedmr", argument]) for argument in sys.argv[1:]]
print(codes == [2] * len(codes), {"jax", "flax", "fedjax_pcdd.methods"} & set(sys.modules))
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    completed = subprocess.run([sys.executable, "-c", code, *WRONG], capture_output=True, text=True, cwd=ROOT)
    assert completed.stdout == "True set()\n", completed.stderr
    assert len(completed.stderr.splitlines()) == len(WRONG)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2  # processor time, however busy it is


@pytest.mark.slow
def test_a_wrong_option_takes_less_than_two_seconds_of_processor_time(tmp_path):
    for argument in ("--devices=1000", "--lr-steps=5,3", "--run-dir="):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        completed = subprocess.run([*RUN, argument], capture_output=True, text=True, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (completed.returncode, len(completed.stderr.splitlines())) == (2, 1)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert list(tmp_path.iterdir()) == []


NAMES = sorted(
    {*OPTIONS, *(name for cls in METHODS.values() for name in options_of(cls)), "server_optimizer"}
    - {"preset", "resume"}
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["0", "-1", "1e400", "007", "1_000", "0x10", " 3", "٣", "nan", "none", "true", "1,2", "auto"]),
)
VALUES = st.one_of(
    NUMBERS.map(str),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["", "a" * 5000, "../x", "x.py:y", "nosuchmodule:object", "fedavg", "a,b", "127.0.0.1:99999999"]),
)


def outcome(argv):
    """Exit code and stderr of the parser."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = guarded(lambda argv: parse(argv) and None, argv)
    return code, err.getvalue()


def is_accepted_or_one_sentence(argv):
    code, err = outcome(argv)
    return (code, err) == (0, "") or (code == 2 and err.count("\n") == 1 and len(err.strip()) > 10)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(
    method=st.sampled_from(sorted(METHODS)),
    chosen=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=3),
)
def test_any_value_of_any_option_is_accepted_or_refused_in_one_sentence(method, chosen):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen]
    assert is_accepted_or_one_sentence([f"--method={method}", *options])


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=4))
def test_any_words_are_accepted_or_refused_in_one_sentence(words):
    assert is_accepted_or_one_sentence(words)
