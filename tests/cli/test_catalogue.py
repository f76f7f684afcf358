"""The table of methods: numbers that are sent, kept and held, counted from the program."""

from pathlib import Path

import pytest

from catalogue import BLOCK, markdown
from fedjax_pcdd import models
from fedjax_pcdd.analysis.traffic import PUBLIC, Traffic, in_words, traffic
from fedjax_pcdd.cli.help import method_rows as rows
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.methods import METHODS, get

README = Path(__file__).parents[2] / "README.md"
SHAPE = (8, 8, 1)
P, C, D = 64 * 200 + 200 + 200 * 10 + 10, 10, 200
HEAD = C * D + C
GENERATOR = (32 + C) * 256 + 256 + 4 * 256 + 256 * D + D  # two layers, batch norm with statistics


def counted_traffic(name, public=PUBLIC, **hyper) -> Traffic:
    model = models.build("mlp", num_classes=C, image_shape=SHAPE)
    return traffic(get(name)(**hyper), model, SHAPE, public)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "down", "up", "client"),
    [
        ("fedavg", P, P, 0),
        ("fedmr", P + C * D + C, P + C * D + C, 0),
        ("feddyn", P, P, P),
        ("feddc", 2 * P, 2 * P, 2 * P),
        ("scaffold", 2 * P, 2 * P, P),
        ("fedgen", P + GENERATOR + C, P + C, 0),
        ("fedrep", P - HEAD, P - HEAD, HEAD),
        ("fedproto", C * D + C, C * D + C, P),
        ("solo", 0, 0, P),
        ("fedmd", 5000 * C, 5000 * C, P),
    ],
)
def test_traffic_agrees_with_the_equations(name, down, up, client):
    sizes = counted_traffic(name)
    assert (sizes.down, sizes.up, sizes.client) == (down, up, client)


@pytest.mark.parametrize(("name", "held"), [("fedavg", P), ("fedprox", 2 * P), ("feddyn", 3 * P), ("scaffold", 4 * P)])
def test_a_client_holds_the_numbers_that_the_equations_need(name, held):
    assert counted_traffic(name).held == held


def test_traffic_counts_as_many_public_images_as_there_are():
    sizes = counted_traffic("fedmatch", public=96)
    assert (sizes.down, sizes.up) == (2 * 96 * C, 96 * C)
    assert [in_words(count, sizes, C) for count in (sizes.down, sizes.up)] == ["2 N C", "N C"]


def test_traffic_of_an_exchange_counts_every_helper_and_averaged_models():
    sizes = counted_traffic("fedmatch", public=96, helpers=5)
    assert (sizes.down, sizes.up) == (5 * 96 * C, 96 * C)
    sizes = counted_traffic("fedmd", public=96, average="trained")
    assert (sizes.down, sizes.up) == (96 * C + P, 96 * C + P)


def test_logits_that_the_server_computes_from_models_are_not_sent():
    assert counted_traffic("feddf").up == P
    assert counted_traffic("feddf+prototypes").up == P + C * D + C


def test_what_the_server_computes_from_models_is_not_sent():
    assert counted_traffic("fedcm", direction="per_client").up == counted_traffic("fedcm").up == P + 1
    assert counted_traffic("feddyn", weighted_statistics=True).up == counted_traffic("feddyn").up == P


@pytest.mark.thorough
def test_a_hyper_parameter_changes_the_count():
    assert counted_traffic("fedgela", layers=2).model > counted_traffic("fedgela", layers=0).model


def test_counts_are_written_as_sums_of_symbols():
    sizes = Traffic(0, 0, 0, 0, model=1000, head=84, features=8)
    assert in_words(2083, sizes, 10) == "2P + 83"
    assert in_words(1080, sizes, 10) == "P + C D"


def test_readme_and_command_line_show_all_methods_with_their_counts(capsys):
    block = BLOCK.search(README.read_text())
    assert block is not None
    assert block[0] == f"<!-- methods -->\n{markdown(rows())}<!-- /methods -->"
    assert not any("?" in row for row in rows())
    assert main(["--list-methods"]) == 0
    output = capsys.readouterr().out
    assert all(row.name in output and row.up in output for row in rows())


@pytest.mark.thorough
def test_committed_counts_are_those_of_the_program():
    """For a few methods; one command writes the counts of all."""
    model = models.build("mlp", num_classes=10, image_shape=(28, 28, 1))
    committed = {row.name: row for row in rows()}
    for name in ("fedgela", "feddc", "fccl"):
        sizes = traffic(METHODS[name](), model, (28, 28, 1))
        row = committed[name]
        words = [in_words(getattr(sizes, key), sizes, 10) for key in ("down", "up", "client", "held")]
        assert words == [row.down, row.up, row.client, row.held]
