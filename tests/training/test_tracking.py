"""--track: it does not change training, and a resumed run writes the same lines."""

import json
import shutil

import numpy as np
import pytest

from fedjax_pcdd.analysis.pictures import draw
from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.analysis.trained import Observed
from fedjax_pcdd.api import runs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training import tracking
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.folder import TRACK
from fedjax_pcdd.training.tracking import names_of

ALL = tuple(QUANTITIES)
SMALL = {
    "rounds": 4,
    "local_epochs": 1,
    "batch_size": 32,
    "lanes": 1,
    "quiet": True,
    "fine_tune_epochs": 0,
    "keep": 9,
    "checkpoint_every": 1,
}


def run(folder, **options):
    """Train on digits; returns the rows of metrics without times."""
    runs.run(*build({"method": "fedavg", "clients": 4, "run_dir": folder, **SMALL, **options}))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def test_an_unknown_quantity_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="'angels': did you mean 'angles'"):
        build({"track": "spectrum,angels"})


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:invalid value:RuntimeWarning")
def test_without_two_classes_or_test_samples_what_needs_two_has_no_entry(tmp_path):
    images = np.random.default_rng(0).normal(size=(9, 4, 4)).astype(np.float32)
    labels = np.zeros(9, np.int32)
    data = {"x_train": images[:8], "y_train": labels[:8], "x_test": images[8:], "y_test": labels[8:]}
    np.savez(tmp_path / "one.npz", **data)
    options = {"dataset": str(tmp_path / "one.npz"), "clients": 2, "partition": "iid", "rounds": 1, "batch_size": 4}
    run(tmp_path / "run", **options, model="mlp", track="angles,features,spectrum")
    (line,) = lines_of(tmp_path / "run")
    entry = json.loads(line)
    assert all("etf" not in entry[name] and entry[name]["global"]["all"] is None for name in ("angles", "features"))
    assert entry["spectrum"]["global"] == {}


@pytest.mark.thorough
def test_samples_streamed_from_the_host_are_tracked_to_the_same_numbers(tmp_path):
    options = {"method": "fedmr", "track": ",".join(ALL), "cohort": 2, "rounds": 2}
    storages = {"device": {}, "stream": {"data_memory": 10}}
    rows = [run(tmp_path / storage, data=storage, **options, **overrides) for storage, overrides in storages.items()]
    assert rows[0] == rows[1]
    assert (tmp_path / "device" / TRACK).read_text() == (tmp_path / "stream" / TRACK).read_text()


def test_a_quantity_named_twice_is_tracked_once():
    assert names_of("intra, angles,intra") == ("intra", "angles")


@pytest.mark.parametrize("method", ["fml", "fedrep", "fedgela"])
def test_training_repeated_for_tracking_has_the_traits_of_the_method(method):
    traits = METHODS[method]().traits()
    assert Observed(METHODS[method](), (), print).traits() == traits._replace(summary=None)


def test_the_tracker_gets_the_seed_and_the_options_of_the_run(tmp_path, monkeypatch):
    calls = []

    def make_tracker(names, simulation, seed, *, local):
        calls.append((names, seed, local))
        raise KeyboardInterrupt

    monkeypatch.setattr(tracking, "Tracker", make_tracker)
    for local in (True, False):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(local), track="intra,angles", track_local=local, seed=3)
    assert calls == [(("intra", "angles"), 3, True), (("intra", "angles"), 3, False)]


def lines_of(folder):
    return (folder / TRACK).read_text().splitlines(keepends=True)


def interrupted(whole, folder):
    """A copy of a run that ends with its second round."""
    shutil.copytree(whole, folder)
    for round in ("3", "4"):
        shutil.rmtree(folder / "checkpoints" / round)
    (folder / "summary.json").unlink()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that tracks every quantity, and its rows of metrics without times."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    return folder, run(folder, track=",".join(ALL))


@pytest.mark.thorough
def test_tracking_changes_no_bit_of_the_metrics(whole, tmp_path):
    assert run(tmp_path / "run") == whole[1]


@pytest.mark.thorough
def test_every_round_has_its_line_and_every_quantity_its_picture(whole):
    rows = [json.loads(line) for line in lines_of(whole[0])]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert set(rows[0]) == {"round", *ALL}
    assert all((whole[0] / f"track_{name}.png").read_bytes().startswith(b"\x89PNG") for name in ALL)


@pytest.mark.thorough
def test_a_resumed_run_tracks_the_same_bytes(whole, tmp_path):
    folder = interrupted(whole[0], tmp_path / "run")
    with open(folder / TRACK, "a") as file:
        file.write('{"round": 5, "angl')
    run(folder, resume=folder, track=",".join(ALL))
    assert lines_of(folder) == lines_of(whole[0])


@pytest.mark.thorough
def test_quantities_added_on_resume_begin_there_and_change_nothing(whole, tmp_path):
    folder = interrupted(whole[0], tmp_path / "run")
    lines_before = [
        json.dumps({key: json.loads(line)[key] for key in ("round", "angles")}) + "\n" for line in lines_of(folder)
    ]
    (folder / TRACK).write_text("".join(lines_before))
    assert run(folder, resume=folder, track=",".join(ALL)) == whole[1]
    assert lines_of(folder) == [*lines_before[:2], *lines_of(whole[0])[2:]]


@pytest.mark.thorough
def test_a_resumed_run_may_stop_tracking(whole, tmp_path):
    folder = interrupted(whole[0], tmp_path / "run")
    assert run(folder, resume=folder) == whole[1]
    assert lines_of(folder) == lines_of(whole[0])[:2]


@pytest.mark.thorough
def test_every_second_round_and_the_last_are_tracked(tmp_path):
    run(tmp_path / "run", track="angles", track_every=2, track_local=False, rounds=3)
    assert [json.loads(line)["round"] for line in lines_of(tmp_path / "run")] == [2, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
def test_a_picture_is_drawn_where_no_value_is_known(tmp_path, name):
    rows = [{"round": 1, name: {"global": None, "local": None}}]
    draw(name, {"a": rows, "b": []}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
