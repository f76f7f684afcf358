"""The committed tables of docs/leaderboard.md and docs/results.md are those of the committed results."""

import shutil
from pathlib import Path

import pytest

import all_methods
from fedjax_pcdd.cli.leaderboard import leaderboard_main

ROOT = Path(__file__).parents[2]


def test_the_leaderboards_tables_are_those_of_its_results(tmp_path):
    page = tmp_path / "leaderboard.md"
    shutil.copy(ROOT / "docs/leaderboard.md", page)
    assert leaderboard_main([f"--page={page}", f"--results={ROOT / 'results/leaderboard'}"]) == 0
    assert page.read_text(encoding="utf-8") == (ROOT / "docs/leaderboard.md").read_text(encoding="utf-8")


def test_the_tables_of_all_methods_are_those_of_their_results(tmp_path, monkeypatch):
    page = tmp_path / "results.md"
    shutil.copy(ROOT / "docs/results.md", page)
    monkeypatch.setattr(all_methods, "PAGE", page)
    all_methods.write_page()
    assert page.read_text(encoding="utf-8") == (ROOT / "docs/results.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_a_row_has_the_seeds_and_the_sentences_of_those_that_failed(tmp_path, monkeypatch):
    options = "--dataset=digits --clients=4 --rounds=2 --local-epochs=1 --seed=0:2"
    monkeypatch.setitem(all_methods.TABLES, "digits", options)
    row = all_methods.run("digits", "fedavg --lr=1e30", tmp_path, [])
    assert row["seeds"] == []
    assert [sentence.partition(": ")[0] for sentence in row["failed"]] == ["fedavg-s0", "fedavg-s1"]
    assert all("not finite" in sentence for sentence in row["failed"])
