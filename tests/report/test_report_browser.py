"""The page of a report in a real browser, opened as a file; skipped where no browser is installed."""

import itertools

import browser
import pytest
from made_up_runs import in_preset, write_experiments, write_run

from fedjax_pcdd.cli.report import report_main

pytestmark = pytest.mark.skipif(browser.executable() is None, reason="no Chromium or Chrome on this machine")
METHODS = {"fedavg": 0.5, "moon": 0.7, "fedprox": 0.6}
LONG_NAME = "a-long-name-of-a-folder-of-a-run-that-somebody-has-chosen-with-care"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A report over three methods, two seeds, a published table, and an unfinished run."""
    folder = tmp_path_factory.mktemp("report")
    experiments = write_experiments(folder / "experiments")
    for seed, (method, ga) in itertools.product((0, 1), METHODS.items()):
        write_run(folder / f"runs/{LONG_NAME}/{method}{seed}", ga + seed / 100, seed=seed, method=method)
    in_preset(folder / "runs/cell", "A")
    write_run(folder / "runs/half", finished=False, seed=7)
    assert report_main([str(folder / "runs"), f"--output={folder / 'out'}"], experiments) == 0
    return (folder / "out/report.html").as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


def test_the_page_loads_without_an_error_and_asks_for_no_other_file(chromium, address):
    chromium.open(address)
    assert chromium.console == []
    assert {url for url in chromium.requests if not url.startswith("data:")} == {address}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_but_tables_is_wider_than_the_window(chromium, address, width, dark):
    chromium.open(address, width, dark=dark)
    assert chromium.value("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_the_background(chromium, address, dark):
    chromium.open(address, dark=dark)
    brightness = "getComputedStyle(document.body).{}.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)"
    text, background = (chromium.value(brightness.format(name)) for name in ("color", "backgroundColor"))
    assert (text > background) == dark
    assert abs(text - background) > 600


@pytest.mark.parametrize(
    ("heading", "clicks", "order"),
    [
        (1, 1, ["moon", "fedprox", "fedavg"]),  # numbers: the largest first
        (1, 2, ["fedavg", "fedprox", "moon"]),
        (0, 1, ["fedavg", "fedprox", "moon"]),  # text: from A
        (0, 2, ["moon", "fedprox", "fedavg"]),
    ],
)
def test_a_click_on_a_heading_sorts_the_table(chromium, address, heading, clicks, order):
    chromium.open(address)
    table = "[...document.querySelectorAll('section')].find((s) => s.textContent.startsWith('digits · dirichlet'))"
    table += ".querySelector('table')"
    for _ in range(clicks):
        chromium.value(f"{table}.querySelectorAll('th button')[{heading}].click()")
    assert chromium.value(f"[...{table}.tBodies[0].rows].map((row) => row.cells[0].textContent)") == order
    aria_sort = chromium.value(f"{table}.querySelectorAll('th')[{heading}].ariaSort")
    assert aria_sort == ("descending" if order[0] == "moon" else "ascending")


def test_cells_without_a_number_stay_last(chromium, address):
    chromium.open(address)
    column = "[...document.querySelectorAll('section.runs tbody tr')].map((row) => row.cells[8].textContent)"
    for _ in range(2):
        chromium.value("document.querySelectorAll('section.runs th button')[8].click()")
        assert chromium.value(column)[-1] == "–"


def test_every_picture_is_shown(chromium, address):
    chromium.open(address)
    widths = "[...document.querySelectorAll('figure > *:first-child')].map((x) => x.getBoundingClientRect().width)"
    assert min(chromium.value(widths)) > 200
    assert all(chromium.value("[...document.images].map((image) => image.naturalWidth > 0)"))
