"""The files of a report: Markdown, CSV, LaTeX, and the page."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest
from made_up_runs import in_preset, write_experiments, write_run
from rich.console import Console

from fedjax_pcdd.cli.report import report_main
from fedjax_pcdd.report.collect import collect
from fedjax_pcdd.report.contents import own_table
from fedjax_pcdd.report.grouping import Cells, group
from fedjax_pcdd.report.plots import curves, inline
from fedjax_pcdd.report.tables import comma_separated, latex, markdown, terminal
from fedjax_pcdd.training.folder import CLAIMS


@pytest.fixture
def cells(tmp_path):
    return Cells(tmp_path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The files of a report over finished and unfinished runs."""
    tmp_path = tmp_path_factory.mktemp("report")
    experiments = write_experiments(tmp_path / "experiments")
    in_preset(tmp_path / "runs/a", "A", ga=0.52)
    in_preset(tmp_path / "runs/b", "A", "fedprox", ga=0.6)
    write_run(tmp_path / "runs/c", method="moon")
    write_run(tmp_path / "runs/half", finished=False, seed=7)
    assert report_main([str(tmp_path / "runs"), f"--output={tmp_path / 'out'}"], experiments) == 0
    return tmp_path / "out"


@pytest.mark.thorough
def test_every_format_is_written(report):
    names = {path.name for path in report.iterdir()}
    assert names == {"report.html", "report.md", "report.csv", "report.tex", "curves"}
    assert all(path.read_text().startswith("<?xml") for path in (report / "curves").iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_unfinished_runs_are_listed_with_their_rounds(report, name):
    assert "half is unfinished: 2 of 3 rounds" in (report / name).read_text()


def test_of_very_many_clients_the_page_shows_the_first(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "clients.jsonl").write_text(json.dumps({"round": 3, "pa_per_client": [0.5] * 1500}) + "\n")
    assert report_main([str(folder), f"--output={tmp_path / 'out'}"]) == 0
    page = (tmp_path / "out/report.html").read_text()
    assert "PA by client, best, %; the first 1000 of 1500" in page
    assert "client 999" in page
    assert "client 1000" not in page


def test_a_failed_experiment_of_a_sweep_is_reported_with_its_reason(tmp_path, capsys):
    for name, finished in (("a", True), ("b", False), ("c", False)):
        write_run(tmp_path / "runs" / name, finished=finished)
        (tmp_path / "runs" / CLAIMS).mkdir(exist_ok=True)
    for name in "ab":  # a has been run again since, and finished
        (tmp_path / "runs" / CLAIMS / f"{name}.failed").write_text("`lr` is too large: the loss is not finite.\n")
    assert report_main([str(tmp_path / "runs"), f"--output={tmp_path / 'out'}"]) == 0
    output = capsys.readouterr().out
    assert "b failed after 2 of 3 rounds and is in no table: --lr is too large: the loss is not finite.\n" in output
    assert "c is unfinished: 2 of 3 rounds; it is in no table.\nWhat is unfinished goes on with " in output
    assert " --resume=FOLDER.\n" in output
    assert "<p>1 finished runs, 1 unfinished, 1 failed." in (tmp_path / "out/report.html").read_text()
    assert "a failed" not in output
    assert ">failed<" in (tmp_path / "out/report.html").read_text()


def test_unfinished_runs_are_in_no_table(tmp_path, cells):
    assert group(collect([write_run(tmp_path / "a", finished=False)]), cells) == []


def test_markdown_has_means_paper_numbers_differences_and_marks(report):
    text = (report / "report.md").read_text()
    assert "| fedprox | **60.00** (60.00, +0.00) |" in text
    assert "| fedavg | <u>52.00</u> (50.00 ± 0.50, +2.00) |" in text


def test_csv_holds_every_number_unrounded(report):
    rows = list(csv.DictReader(io.StringIO((report / "report.csv").read_text())))
    (line,) = [row for row in rows if row["method"] == "fedprox" and row["paper"]]
    assert (float(line["mean"]), float(line["difference"]), line["rank"], line["note"]) == (
        60.0,
        0.0,
        "1",
        "as printed",
    )


def test_latex_escapes_and_marks(report):
    text = (report / "report.tex").read_text()
    assert r"fedprox & \textbf{60.00} (60.00, +0.00) \\" in text
    assert r"best round, \%" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 4


def test_a_row_has_as_many_cells_as_the_table_columns_in_each_format(tmp_path, cells):
    (run_group,) = group(collect([write_run(tmp_path / "a")]), cells)
    table = own_table(run_group)
    assert {line.count("|") for line in markdown(table).splitlines() if line.startswith("|")} == {8}
    assert {line.count(" & ") for line in latex(table).splitlines() if " & " in line} == {6}
    assert {len(line) for line in csv.reader(io.StringIO(comma_separated([table])))} == {14}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A report over runs whose folder, data_dir or command is markup."""
    tmp_path = tmp_path_factory.mktemp("hostile")
    origin = {"command": "x `` <img src=x> | *y*\n# z"}
    write_run(tmp_path / "<b>a|b*c*`d`[e](f)_g_", finished=False)
    write_run(tmp_path / "runs", origin=origin, data_dir="<i>|")
    assert report_main([str(tmp_path), f"--output={tmp_path / 'out'}"], tmp_path) == 0
    return tmp_path / "out"


@pytest.mark.thorough
def test_markup_that_the_markdown_quotes_is_escaped(hostile):
    text = (hostile / "report.md").read_text()
    assert r"&lt;b&gt;a\|b\*c\*\`d\`[e\](f)\_g\_ is unfinished" in text
    assert "```x `` <img src=x> | *y* # z```" in text
    assert not re.search(r"^# z", text, re.MULTILINE)


def test_markup_that_the_page_quotes_is_escaped(hostile):
    page = Page((hostile / "report.html").read_text())
    assert "b" not in page.tags
    assert page.tags.count("i") == 1  # of the key
    assert page.tags.count("img") == 1


def test_nothing_is_marked_among_runs_of_different_lengths(tmp_path, cells):
    write_run(tmp_path / "runs/a", 0.5)
    write_run(tmp_path / "runs/b", 0.7, method="moon", rounds=9)
    (run_group,) = group(collect([tmp_path / "runs"]), cells)
    assert {cell.rank for row in own_table(run_group).rows for cell in row.cells} == {0}


def test_every_picture_has_a_text_alternative(report):
    text = (report / "report.md").read_text()
    assert "![GA (%) over the rounds: fedavg, fedprox](curves/0-ga.svg)" in text
    for path in (report / "curves").iterdir():
        assert re.search(r'<svg role="img" aria-label="[^"]+over the rounds', path.read_text())


def test_the_terminal_shows_the_cells_of_the_table(tmp_path, cells):
    (run_group,) = group(collect([write_run(tmp_path / "a", data_dir="[red]")]), cells)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(terminal(own_table(run_group)))
    text = console.export_text()
    assert "GA mean of last 10" in text
    assert "25.00" in text


class Page(HTMLParser):
    """Tags, ids and addresses of a page, the tags that are still open, and end tags that close none."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.names, self.addresses, self.wrong = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture
def page(report):
    return Page((report / "report.html").read_text())


def test_the_page_needs_no_other_file(report, page):
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not re.search(r"https?:|@import|url\((?!#)", (report / "report.html").read_text())


def test_the_page_closes_every_tag_and_has_unique_ids(page):
    assert (page.wrong, page.open) == ([], [])
    assert len(page.names) == len(set(page.names))


def test_every_reference_inside_the_page_leads_somewhere(report, page):
    referenced = set(re.findall(r'(?:href="#|url\(#)([^")]+)', (report / "report.html").read_text()))
    assert referenced <= set(page.names)


def test_the_page_shows_curves_partitions_and_every_run(page):
    assert page.tags.count("svg") == 6  # GA, PA and loss of two groups
    assert page.tags.count("img") == 2  # a partition of each group: equal ones once
    assert page.tags.count("details") == 4


def test_the_page_shows_commands_and_configurations_as_text(report):
    text = (report / "report.html").read_text()
    assert "python experiments/run.py &lt;x&gt;" in text
    assert "method: fedprox\n" in text
    assert "The command was not recorded" in text


def test_a_run_of_python_with_parts_of_its_own_is_given_no_command(tmp_path):
    write_run(tmp_path / "run", origin={"given": ["federation"]})
    assert report_main([str(tmp_path / "run"), f"--output={tmp_path / 'out'}"]) == 0
    text = (tmp_path / "out/report.html").read_text()
    assert "in Python, with its own federation" in text
    assert "The command was not recorded" not in text


def test_the_page_shows_accuracies_by_class_and_client(report):
    text = (report / "report.html").read_text()
    assert re.search(r"fedprox, seed 0</td><td [^>]*>60.0</td><td>–</td>", text)
    assert re.search(r"fedprox, seed 0</td><td [^>]*>80.0</td><td [^>]*>25.0</td>", text)


def test_the_page_supports_dark_mode_and_phones(report):
    text = (report / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text


def test_pictures_on_one_page_share_no_ids(tmp_path, cells):
    (run_group,) = group(collect([write_run(tmp_path / "a")]), cells)
    svg = curves(run_group, "ga")
    assert svg is not None
    assert not set(Page(inline(svg, "x")).names) & set(Page(inline(svg, "y")).names)
