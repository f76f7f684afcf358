"""What docs/leaderboard.md and docs/results.md say is what the committed results say."""

import json
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


def test_fedrls_table_in_full_is_described_as_its_results_are():
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    fedavg, fedrl = (
        json.loads((ROOT / f"results/fedrl/table1/full-fmnist-dir0.5-{name}-s0.json").read_text())
        for name in ("fedavg", "fedrl")
    )
    assert f"FedAvg reaches {100 * fedavg['ga_best']:.2f} %, FedRL {100 * fedrl['ga_best']:.2f} % (one seed)" in text
    first, second = (next(r for r, ga in enumerate(fedavg["ga"], 1) if ga >= paper) for paper in (0.7766, 0.8127))
    assert f"77.66 in round {first} (81.27 in round {second})" in text
    assert (fedrl["decisive"]["grad_clip"], fedrl["decisive"]["distance"]) == ("none", "batch_norm")
    assert "no clipping, FedRL's distance over the batch" in text


@pytest.mark.thorough
def test_a_row_has_the_seeds_and_the_sentences_of_those_that_failed(tmp_path, monkeypatch):
    options = "--dataset=digits --clients=4 --rounds=2 --local-epochs=1 --seed=0:2"
    monkeypatch.setitem(all_methods.TABLES, "digits", options)
    row = all_methods.run("digits", "fedavg --lr=1e30", tmp_path, [])
    assert row["seeds"] == []
    assert [sentence.partition(": ")[0] for sentence in row["failed"]] == ["fedavg-s0", "fedavg-s1"]
    assert all("not finite" in sentence for sentence in row["failed"])
