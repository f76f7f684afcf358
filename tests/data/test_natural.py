"""Federations on disk, client by client: writing, memory-mapping, refusal of incomplete ones, a million clients."""

import json
import resource
import time

import numpy as np
import pytest

import fedjax_pcdd as fp
from fedjax_pcdd.cli.prepare import prepare_main
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.augment import pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation, hold_out
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.data.natural import META
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.setup import Setup


def client_samples(num_classes=3, train_sizes=(4, 0, 7)):
    """Training and test samples of each client; one has none for training."""
    rng = np.random.default_rng(0)
    for size in train_sizes:
        x, y = rng.integers(0, 256, (size + 2, 5, 4, 1), dtype=np.uint8), rng.integers(0, num_classes, size + 2)
        yield x[2:], y[2:], x[:2], y[:2]


@pytest.fixture
def folder(tmp_path):
    return fp.write_federation(tmp_path / "own", client_samples(), num_classes=3, class_names=["a", "b", "c"])


def test_images_of_only_0_and_1_are_kept_as_uint8_like_those_of_other_clients(tmp_path):
    dark = np.ones((3, 5, 4, 1), np.uint8)
    folder = fp.write_federation(tmp_path / "dark", [*client_samples(), (dark, [0, 1, 2])])
    np.testing.assert_array_equal(fp.load_dataset(str(folder)).x_train[-3:], dark)
    with pytest.raises(fp.UserError, match=r"kept as float32 \[5, 4, 1\], those before as uint8 .* all as float32"):
        fp.write_federation(tmp_path / "other", [*client_samples(), (dark.astype(np.float32), [0, 1, 2])])


def test_clients_are_loaded_with_the_samples_that_were_written(folder):
    data = fp.load_dataset(str(folder))
    lists = fp.partition(data, "natural").partition
    assert (data.name, data.num_classes, data.class_names) == ("own", 3, ("a", "b", "c"))
    assert isinstance(data.x_train, np.memmap)
    for k, (x, y, x_test, y_test) in enumerate(client_samples()):
        np.testing.assert_array_equal(data.x_train[lists.train[k]], x)
        np.testing.assert_array_equal(data.y_train[lists.train[k]], y)
        np.testing.assert_array_equal(data.x_test[lists.test[k]], x_test)
        np.testing.assert_array_equal(data.y_test[lists.test[k]], y_test)


def test_a_folder_may_be_read_by_those_who_may_read_others(folder, tmp_path):
    (tmp_path / "other").mkdir()
    assert folder.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_tables_are_kept_as_they_are_whatever_their_type(tmp_path, dtype):
    table, y = np.arange(24).reshape(4, 6).astype(dtype), [0, 1, 0, 1]
    data = fp.load_dataset(str(fp.write_federation(tmp_path / "own", [(table, y, table, y)])))
    np.testing.assert_array_equal(data.x_train, fp.from_arrays(table, y, table, y).x_train)
    assert data.x_train.dtype == np.float32


@pytest.mark.parametrize(
    ("labels", "sentence"), [([1, 2, 3], r"lack 1 of 4 classes \(0\)"), ([0, 200, 300], "lack 298 of 301 classes")]
)
def test_labels_with_gaps_are_warned_of_unless_the_classes_are_named(tmp_path, labels, sentence):
    clients = [(np.zeros((3, 4, 4, 1)), labels)]
    with pytest.warns(UserWarning, match=sentence):
        fp.write_federation(tmp_path / "own", clients)
    folder = fp.write_federation(tmp_path / "named", clients, class_names=[str(i) for i in range(400)])
    assert fp.load_dataset(str(folder)).num_classes == 400


def test_clients_without_test_samples_are_loaded_too(tmp_path):
    clients = [(x, y) for x, y, *_ in client_samples()]
    data = fp.load_dataset(str(fp.write_federation(tmp_path / "own", clients)))
    assert (data.x_train.shape, data.x_test.shape, data.x_test.dtype) == ((11, 5, 4, 1), (0, 5, 4, 1), np.uint8)
    lists = partition("natural", data.y_train, data.y_test, groups=data.groups)
    assert [len(indices) for indices in lists.train] == [4, 7]  # one client has no samples at all, and is left out
    assert [len(indices) for indices in lists.test] == [0, 0]


def uint8(value, count=3):
    return np.full((count, 5, 4, 1), value, np.uint8), [0, 1, 2]


@pytest.mark.parametrize("values", [(0, 1, 200), (1, 0, 200), (200, 1, 0)])
def test_a_client_with_dark_images_may_come_first(tmp_path, values):
    data = fp.load_dataset(str(fp.write_federation(tmp_path / "own", map(uint8, values))))
    assert data.x_train.dtype == np.uint8
    assert data.x_train[::3].ravel()[::20].tolist() == list(values)


def test_images_of_which_all_are_0_or_1_in_uint8_are_refused(tmp_path):
    with pytest.raises(fp.UserError, match="would be divided by 255: give them as float32"):
        fp.write_federation(tmp_path / "own", map(uint8, (0, 1)))


def test_a_federation_keeps_its_name_and_that_it_is_a_text(tmp_path):
    codes, labels = np.arange(320, dtype=np.uint8).reshape(4, 80, 1, 1) % 90, np.arange(4)
    speakers = np.array([0, 0, 1, 1])
    text = Dataset("lines", codes, labels, codes, labels, 4, groups_train=speakers, groups_test=speakers, text=True)
    federation = Federation(text, Partition(([0, 1], [2, 3]), ([0, 1], [2, 3])))
    data = fp.load_dataset(str(fp.write_federation(tmp_path / "own", federation)))
    assert (data.name, data.text) == ("lines", True)
    np.testing.assert_array_equal(data.x_train, codes)
    assert fp.load_dataset(str(fp.write_federation(tmp_path / "named", federation, name="mine"))).name == "mine"


@pytest.mark.parametrize("lists", [([1, 0], [2, 3]), ([0], [1, 2, 3]), ([0, 1, 2, 3],)])
def test_a_text_is_written_by_speaker(tmp_path, lists):
    """Else windows follow each other that do not in the text, and validation windows could be read in training."""
    codes, labels, speakers = np.zeros((4, 8, 1, 1), np.uint8), np.arange(4), np.array([0, 0, 1, 1])
    for groups in ({"groups_train": speakers, "groups_test": speakers}, {}):
        text = Dataset("lines", codes, labels, codes, labels, num_classes=4, text=True, **groups)
        with pytest.raises(fp.UserError, match="a text is written by speaker: partition it by natural"):
            fp.write_federation(tmp_path / "own", Federation(text, Partition(lists, lists)))


def test_a_federation_from_disk_is_normalised_and_augmented_by_its_name(tmp_path):
    levels, labels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8), np.arange(20) % 10
    named = fp.from_arrays(levels, labels, levels, labels, name="cifar10")
    folder = fp.write_federation(tmp_path / "own", fp.partition(named, "iid", clients=4))
    options = {"dataset": str(folder), "partition": "natural", "clients": 4, "model": "mlp", "batch_size": 5}
    setup = Setup([build(options)])
    private, public = setup.pipelines()
    assert private == pipeline("cifar10", True, (32, 32, 3))
    assert public == pipeline("cifar10", False, (32, 32, 3))
    assert setup.inputs(0, *setup.pairs[0])["pipeline"] == repr(private)  # so that an older run is not continued
    assert Setup([build({"model": "mlp", "clients": 4, "beta": 1.0})])._unusual_pipeline() is None


def test_a_federation_with_an_empty_client_is_not_written(tmp_path):
    images, labels = uint8(200)
    data = Dataset("mine", images, np.array(labels), images, np.array(labels), num_classes=3)
    federation = Federation(data, Partition(([0], [], [1, 2]), ([0], [], [1, 2])))
    with pytest.raises(fp.UserError, match="client 1 has no samples, so the clients after it would move up"):
        fp.write_federation(tmp_path / "own", federation)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_classes": "2"}, "num_classes must be a number of classes"),
        ({"num_classes": 2.5}, "num_classes must be a number of classes"),
        ({"class_names": 5}, "class_names must be a list of names"),
        ({"class_names": "ab"}, "class_names must be a list of names"),
        ({"name": 5}, "name must be a text, not 5"),
        ({"class_names": ["a"]}, "class_names names 1 classes of"),
    ],
)
def test_classes_that_cannot_be_are_refused(tmp_path, options, sentence):
    with pytest.raises(fp.UserError, match=sentence):
        fp.write_federation(tmp_path / "own", client_samples(), **options)


def test_class_names_may_be_an_array_but_not_those_of_a_federation(tmp_path):
    names = np.array(["a", "b", "c"])
    data = fp.load_dataset(str(fp.write_federation(tmp_path / "own", client_samples(), class_names=names)))
    assert data.class_names == ("a", "b", "c")
    for options in ({"class_names": names}, {"num_classes": 5}):
        with pytest.raises(fp.UserError, match="a federation has its own classes: drop num_classes and class_names"):
            fp.write_federation(tmp_path / "again", fp.partition(data, "natural"), **options)


@pytest.mark.parametrize("labels", [None, [2**33, 0, 1], [10**6, 0, 1]])
def test_labels_that_are_no_classes_are_refused(tmp_path, labels):
    with pytest.raises(fp.UserError, match="labels"):
        fp.write_federation(tmp_path / "own", [(uint8(200)[0], labels)])


@pytest.mark.filterwarnings("ignore:the labels lack")
@pytest.mark.parametrize("labels", [([4], [0], [1], [0]), ([0], [4], [1], [0]), ([0], [0], [1], [4])])
def test_classes_are_counted_from_the_labels_of_all_clients_and_both_splits(tmp_path, labels):
    x = np.zeros((1, 4, 4))
    clients = [(x, train, x, test) for train, test in (labels[:2], labels[2:])]
    assert fp.load_dataset(str(fp.write_federation(tmp_path / "own", clients))).num_classes == 5


def test_a_federation_with_held_out_validation_samples_is_not_written(tmp_path):
    federation = hold_out(fp.partition(fp.load_dataset("digits"), "iid", clients=3), 0.1, 0)
    with pytest.raises(fp.UserError, match="before they are held out"):
        fp.write_federation(tmp_path / "own", federation)
    assert not (tmp_path / "own").exists()


@pytest.mark.thorough
def test_training_from_disk_gives_the_same_loss(tmp_path):
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3)
    folder = fp.write_federation(tmp_path / "digits_by_client", federation)
    loaded = fp.partition(fp.load_dataset(str(folder)), "natural")
    options = {"rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "model": "mlp"}
    losses = [fp.simulate(fed, fp.FedAvg(), **options).rows[-1]["loss"] for fed in (federation, loaded)]
    assert losses[0] == losses[1]


def test_the_prepare_command_writes_a_client_for_each_writer(tmp_path, capsys):
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 3
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y, writer=np.arange(12) % 2)
    assert prepare_main(["mine", f"--data-dir={tmp_path}", f"--federation={tmp_path / 'mine'}"]) == 0
    assert prepare_main(["digits", f"--federation={tmp_path / 'digits'}"]) == 2
    assert "Written to" in capsys.readouterr().out
    assert fp.partition(fp.load_dataset(str(tmp_path / "mine")), "natural").sizes.tolist() == [3, 3]


@pytest.mark.parametrize("name", [META, "x_train.npy", "y_train.npy", "offsets_train.npy", "y_test.npy"])
def test_missing_or_truncated_files_are_refused_with_one_sentence(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) - 3])
    with pytest.raises(fp.UserError, match=r"own is not a complete federation .*: write it anew"):
        fp.load_dataset(str(folder))
    (folder / name).unlink()
    with pytest.raises(fp.UserError, match=r"own"):
        fp.load_dataset(str(folder))


def test_a_header_with_a_wrong_bit_is_refused_with_one_sentence(folder):
    content = bytearray((folder / "x_train.npy").read_bytes())
    content[8] ^= 64  # the length of the header
    (folder / "x_train.npy").write_bytes(content)
    with pytest.raises(fp.UserError, match=r"own is not a complete federation .*: write it anew"):
        fp.load_dataset(str(folder))


@pytest.mark.parametrize("offsets", [np.zeros(0, int), np.array(3)])
def test_offsets_without_an_end_are_refused_with_one_sentence(folder, offsets):
    np.save(folder / "offsets_train.npy", offsets)
    with pytest.raises(fp.UserError, match=r"own is not a complete federation .*: write it anew"):
        fp.load_dataset(str(folder))


def test_a_federation_in_another_format_is_refused(folder):
    meta = json.loads((folder / META).read_text())
    (folder / META).write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(fp.UserError, match=r"own is not a complete federation \(format 99, not 1\): write it anew"):
        fp.load_dataset(str(folder))


def test_inconsistent_files_are_refused_with_one_sentence(folder):
    np.save(folder / "offsets_train.npy", np.array([0, 4, 4, 10]))
    with pytest.raises(fp.UserError, match="x, y and offsets of train do not fit together"):
        fp.load_dataset(str(folder))


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([], "there are no clients with samples"),
        (
            [(np.zeros((2, 4, 4)), [0, 1]), (np.zeros((2, 4, 5)), [0, 1])],
            "client 1, given as float64, are kept as float32 .4, 5, 1., .* the same size",
        ),
        (
            [([np.zeros((4, 4)), np.zeros((4, 5))], [0, 1])],
            "the array of train samples of client 0 holds samples of several sizes",
        ),
        (
            [(np.eye(4, dtype=int)[None], [0]), (np.full((1, 4, 4), 9), [1])],
            "1, given as int64, are kept as uint8 .* integers as uint8",
        ),
        ([(np.zeros((2, 4, 4)), [0])], "labels of client 0 must be 2 integers"),
        ([(np.zeros((2, 4, 4)), [0, 1], np.zeros((2, 4, 4)), [])], "the test samples of client 0 have no labels"),
        ([(np.zeros((2, 4, 4)), [0, 5])], "labels run to 5, but there are 3 classes"),
    ],
)
def test_inconsistent_clients_are_refused_and_leave_no_files(tmp_path, clients, sentence):
    with pytest.raises(fp.UserError, match=sentence):
        fp.write_federation(tmp_path / "own", clients, num_classes=3)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(folder):
    with pytest.raises(fp.UserError, match="exists already"):
        fp.write_federation(folder, client_samples())


@pytest.mark.thorough
def test_a_million_clients_start_within_a_minute_and_two_gigabytes(tmp_path):
    clients, samples_each = 1_000_000, 20
    for part, rows in (("train", clients * samples_each), ("test", clients)):
        with open(tmp_path / f"x_{part}.npy", "wb") as file:  # a sparse file: its 16 GB take no space
            header = {"descr": "|u1", "fortran_order": False, "shape": (rows, 28, 28, 1)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + rows * 784)
        np.save(tmp_path / f"y_{part}.npy", np.arange(rows, dtype=np.int32) % 10)
        np.save(tmp_path / f"offsets_{part}.npy", np.arange(clients + 1) * (rows // clients))
    meta = {"format": 1, "name": "million", "num_classes": 10, "class_names": None}
    (tmp_path / META).write_text(json.dumps(meta))
    start, memory_before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = sources.load(str(tmp_path))
    federation = Federation(data, partition("natural", data.y_train, data.y_test, groups=data.groups))
    assert federation.class_counts.shape == (clients, 10)
    assert (federation.sizes == samples_each).all()
    assert time.process_time() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 2e6  # kilobytes
