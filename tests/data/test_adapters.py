"""Data sets of other libraries: small stand-ins with their interface, and the libraries where they are installed."""

import shutil
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image as Pillow

import fedjax_pcdd as fp

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(20) % 2


class Image:
    """Stands in for the type of a column of images."""


class ClassLabel:
    """Stands in for the type of a column of labels."""

    names = ("cat", "dog")


class Split(list):
    """Stands in for a split of the library `datasets`: a list of rows, and the types of the columns."""

    features: ClassVar = {"pixels": Image(), "kind": ClassLabel(), "writer": object()}


def split(rows):
    return Split(
        {"pixels": Pillow.fromarray(IMAGES[i]), "kind": int(LABELS[i]), "writer": f"w{i % 3}"} for i in range(*rows)
    )


def test_hugging_face_columns_are_recognised_by_their_types():
    dataset = fp.from_huggingface({"train": split((0, 12)), "validation": split((12, 20))}, groups="writer")
    np.testing.assert_array_equal(dataset.x_train, IMAGES[:12])
    np.testing.assert_array_equal(dataset.y_test, LABELS[12:])
    assert (dataset.class_names, dataset.num_classes) == (("cat", "dog"), 2)
    assert fp.partition(dataset, "natural").num_clients == 3


def test_a_single_split_gives_a_fifth_of_each_class_to_the_tests():
    dataset = fp.from_huggingface(split((0, 20)))
    assert (len(dataset.y_train), np.bincount(dataset.y_test).tolist()) == (16, [2, 2])
    images = np.concatenate([dataset.x_train, dataset.x_test])
    assert sorted(x.tobytes() for x in images) == sorted(x.tobytes() for x in IMAGES)


def test_splits_that_are_not_read_are_named():
    with pytest.warns(UserWarning, match="from_huggingface takes only train of the data set, not dev"):
        assert len(fp.from_huggingface({"train": split((0, 12)), "dev": split((12, 20))}).y_train) == 10
    parts = {"train": split((0, 12)), "validation": split((12, 16)), "test": split((16, 20))}
    with pytest.warns(UserWarning, match="takes only train and test of the data set, not validation"):
        fp.from_huggingface(parts)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"image": "pixel"}, "no column 'pixel': did you mean 'pixels'"),
        ({"label": "writer"}, "labels must be one integer from 0"),
        ({"groups": "author"}, "no column 'author'"),
    ],
)
def test_unsuitable_columns_are_named(options, sentence):
    with pytest.raises(fp.UserError, match=sentence):
        fp.from_huggingface(split((0, 20)), **options)


@pytest.mark.filterwarnings("ignore")  # the library's own warnings
def test_a_data_set_of_the_hugging_face_library_is_read():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [Pillow.fromarray(x) for x in IMAGES], "label": LABELS.tolist()}
    dataset = fp.from_huggingface(datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features=features)))
    assert (dataset.class_names, dataset.x_train.shape) == (("cat", "dog"), (16, 6, 5, 3))


class Items:
    """Stands in for a data set of torchvision: a length, and an image with its label at each index."""

    def __init__(self, items, **attributes):
        self.items = list(items)
        vars(self).update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Unchanged(Items):
    """Stands in for a data set whose samples torchvision itself reads."""

    def __getitem__(self, i):
        return self.items[i]

    __getitem__.__module__ = "torchvision.datasets.mnist"


def test_arrays_of_torchvision_and_medmnist_are_taken_as_a_whole():
    images, labels = IMAGES[..., 0], LABELS[:, None]
    unread = [None] * 19  # these items are never read
    vision = Unchanged(
        [(Pillow.fromarray(IMAGES[0]), LABELS[0]), *unread],
        data=IMAGES, targets=LABELS.tolist(), classes=["cat", "dog"], transform=None,
    )  # fmt: skip
    medical = Unchanged([(Pillow.fromarray(images[0]), labels[0]), *unread], imgs=images, labels=labels)
    vision, medical = fp.from_torch(vision), fp.from_torch(medical)
    assert (vision.class_names, medical.class_names) == (("cat", "dog"), None)
    np.testing.assert_array_equal(medical.x_train, vision.x_train[..., :1])


def test_items_that_differ_from_the_arrays_are_read_one_by_one():
    grey = IMAGES[..., 0]
    pairs = [(Pillow.fromarray(x).convert("RGB"), int(y)) for x, y in zip(grey, LABELS, strict=True)]
    assert fp.from_torch(Unchanged(pairs, imgs=grey, labels=LABELS[:, None])).x_train.shape == (16, 6, 5, 3)


def test_samples_that_a_subclass_changes_are_read_one_by_one():
    class Noisy(Unchanged):
        def __getitem__(self, i):
            return self.data[i], int(self.targets[i]) ^ (i == 7)

    noisy = fp.from_torch(*[Noisy(LABELS, data=IMAGES, targets=LABELS)] * 2)
    np.testing.assert_array_equal(noisy.y_train, LABELS ^ (np.arange(20) == 7))


def test_a_data_set_of_medmnist_is_read(tmp_path):
    medmnist = pytest.importorskip("medmnist")
    info, rng = medmnist.INFO["pneumoniamnist"], np.random.default_rng(0)
    arrays = {}
    for part, count in info["n_samples"].items():
        arrays |= {f"{part}_images": rng.integers(0, 256, (count, 28, 28), np.uint8)}
        arrays |= {f"{part}_labels": rng.integers(0, 2, (count, 1), np.uint8)}
    np.savez(tmp_path / "pneumoniamnist.npz", **arrays)
    train, test = (medmnist.PneumoniaMNIST(part, root=str(tmp_path)) for part in ("train", "test"))
    dataset = fp.from_torch(train, test)
    assert dataset.class_names == ("normal", "pneumonia")
    np.testing.assert_array_equal(dataset.x_train[..., 0], arrays["train_images"])
    np.testing.assert_array_equal(dataset.y_test, arrays["test_labels"][:, 0])
    assert fp.from_torch(medmnist.PneumoniaMNIST("test", root=str(tmp_path), as_rgb=True)).x_train.shape[-1] == 3


def test_a_data_set_of_torchvision_is_read_with_and_without_a_transform():
    torchvision = pytest.importorskip("torchvision")
    without_transform = torchvision.datasets.FakeData(10, (3, 8, 8), 5)
    with pytest.warns(UserWarning, match="channels first"):
        floats = fp.from_torch(
            torchvision.datasets.FakeData(10, (3, 8, 8), 5, transform=torchvision.transforms.ToTensor())
        )
    images = fp.from_torch(without_transform)
    assert (images.x_train.dtype, floats.x_train.dtype) == (np.uint8, np.float32)
    np.testing.assert_allclose(floats.x_test, images.x_test / np.float32(255), rtol=1e-6)
    np.testing.assert_array_equal(floats.y_train, images.y_train)


def test_the_results_of_a_transform_are_kept():
    pairs = [
        (x[..., :1].transpose(2, 0, 1) / np.float32(255) - 0.5, int(y)) for x, y in zip(IMAGES, LABELS, strict=True)
    ]
    with pytest.warns(UserWarning, match="channels first"):
        data = fp.from_torch(Unchanged(pairs, data=IMAGES, targets=LABELS, transform=print), Items(pairs[:4]))
    assert data.x_train.dtype == np.float32
    np.testing.assert_allclose(data.x_test, IMAGES[:4, ..., :1] / 255 - 0.5, rtol=1e-5, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
    for part, rows in (("train", range(12)), ("val", range(12, 20))):
        for i in rows:
            file = tmp_path / "pets" / part / ("cat", "dog")[LABELS[i]] / f"{i:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Pillow.fromarray(IMAGES[i]).save(file)
    return tmp_path / "pets"


def test_a_folder_of_images_for_each_class_is_a_data_set(folder):
    data = fp.from_folder(folder)
    assert (data.name, data.class_names, data.x_train.shape) == ("pets", ("cat", "dog"), (12, 6, 5, 3))
    np.testing.assert_array_equal(data.y_test, [0] * 4 + [1] * 4)
    np.testing.assert_array_equal(data.x_train[1], IMAGES[2])
    assert len(fp.from_folder(folder / "train").y_test) == 2


def test_images_of_several_sizes_are_refused_unless_stretched_to_a_side(folder):
    Pillow.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "train/cat/other.png")
    with pytest.raises(fp.UserError, match=r"one size, not \(6, 5, 3\), \(9, 9, 3\): resize them"):
        fp.from_folder(folder)
    assert fp.from_folder(folder, side=8).x_train.shape == (13, 8, 8, 3)


def test_images_with_a_palette_are_resized_like_others(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (4, 3), dtype=np.uint8)
    pixels = np.random.default_rng(1).integers(0, 4, (8, 8), dtype=np.uint8)
    indexed = Pillow.fromarray(pixels)
    indexed.putpalette(colours.ravel().tolist())
    data = {}
    for name, image in (("palette", indexed), ("plain", Pillow.fromarray(colours[pixels]))):
        for label in ("cat", "dog"):
            (tmp_path / name / "train" / label).mkdir(parents=True)
            for i in range(5):
                image.save(tmp_path / name / "train" / label / f"{i}.png")
        data[name] = fp.from_folder(tmp_path / name, side=5).x_train
    np.testing.assert_array_equal(data["palette"], data["plain"])


def test_grey_values_of_16_bits_are_kept_unless_mixed_with_colour_images(tmp_path):
    grey = 4000 * np.arange(16, dtype=np.uint16).reshape(4, 4)
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(5):
            Pillow.fromarray(grey + i).save(tmp_path / "train" / name / f"{i}.png")
    with pytest.warns(UserWarning, match="integers from 0 to 60004, no levels from 0 to 255: they reach the model as"):
        data = fp.from_folder(tmp_path)
    assert data.x_train.shape[1:] == (4, 4, 1)
    assert data.x_train.max() > 60_000
    Pillow.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "train/cat/colour.png")
    with pytest.raises(fp.UserError, match="more than 8 bits"):
        fp.from_folder(tmp_path)


def test_unsuitable_folders_are_named(folder, tmp_path):
    with pytest.raises(fp.UserError, match=r"there is no folder .*nowhere"):
        fp.from_folder(tmp_path / "nowhere")
    (folder / "val/dogg").mkdir()
    with pytest.raises(fp.UserError, match=r"class dogg .* did you mean 'dog'"):
        fp.from_folder(folder)
    (folder / "val/dogg").rmdir()
    (folder / "train/cat/notes.txt").write_text("nothing to see")
    with pytest.raises(fp.UserError, match=r"notes\.txt is not an image"):
        fp.from_folder(folder)


def test_folders_beside_train_and_test_are_named_and_images_below_a_class_are_read(folder):
    (folder / "testing").mkdir()
    (folder / "train/cat/more").mkdir()
    Pillow.fromarray(IMAGES[0]).save(folder / "train/cat/more/a.png")
    with pytest.warns(UserWarning, match="from_folder takes only train and val of .*pets, not testing"):
        data = fp.from_folder(folder)
    assert np.bincount(data.y_train).tolist() == [7, 6]
    (folder / "testing").rmdir()
    shutil.copytree(folder / "val", folder / "test")
    with pytest.warns(UserWarning, match="takes only train and test of .*pets, not val"):
        fp.from_folder(folder)
    shutil.rmtree(folder / "test")
    (folder / "test").mkdir()
    with pytest.raises(fp.UserError, match=r"pets/test has no folders: put the images of each class"):
        fp.from_folder(folder)


def test_splits_may_be_capitalised_and_other_names_of_them_are_no_classes(folder):
    (folder / "val").rename(folder / "Test")
    (folder / "train").rename(folder / "Train")
    np.testing.assert_array_equal(fp.from_folder(folder).y_test, [0] * 4 + [1] * 4)
    (folder / "Train").rename(folder / "Training")
    with pytest.raises(fp.UserError, match=r"/Test has the folders of its neighbours, as a split has: name the splits"):
        fp.from_folder(folder)
    shutil.rmtree(folder / "Training")
    with pytest.raises(fp.UserError, match=r"/Test has the folders of its neighbours, as a split has: name"):
        fp.from_folder(folder)


def test_a_class_may_be_called_train_in_capitals_and_have_its_images_deeper(tmp_path):
    for name in ("Car/old", "Train/old", "Train"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        Pillow.fromarray(IMAGES[0]).save(tmp_path / name / "a.png")
    (tmp_path / "Train/old/a.png").unlink()
    (tmp_path / "Train/old").rmdir()
    assert fp.from_folder(tmp_path).class_names == ("Car", "Train")
    (tmp_path / "Train/a.png").unlink()
    (tmp_path / "Train").rename(tmp_path / "Bus")
    (tmp_path / "Bus/old").mkdir()
    Pillow.fromarray(IMAGES[0]).save(tmp_path / "Bus/old/a.png")
    assert fp.from_folder(tmp_path).class_names == ("Bus", "Car")


@pytest.mark.parametrize(
    ("features", "options", "used"),
    [
        ({"domain": ClassLabel(), "label": ClassLabel()}, {}, "label"),
        ({"domain": ClassLabel(), "label": ClassLabel()}, {"label": "domain"}, "domain"),
        ({"domain": object(), "label": object(), "y": object()}, {}, "label"),
        ({"domain": ClassLabel(), "label": object()}, {}, "any of the columns label, domain may hold labels: name the"),
        ({"domain": ClassLabel(), "kind": ClassLabel()}, {}, "any of the columns domain, kind may hold labels"),
    ],
)
def test_of_several_columns_of_labels_that_with_a_usual_name_is_taken(features, options, used):
    kind = type("Rows", (Split,), {"features": {"pixels": Image(), **features}})
    rows = kind(
        {"pixels": Pillow.fromarray(x), **{name: int(name == used and y) for name in features}}
        for x, y in zip(IMAGES, LABELS, strict=True)
    )
    if used in features:
        assert set(fp.from_huggingface(rows, **options).y_train.tolist()) == {0, 1}
    else:
        with pytest.raises(fp.UserError, match=used):
            fp.from_huggingface(rows, **options)


def test_columns_that_the_tests_lack_are_named():
    tests = type("Rows", (Split,), {"features": {"pixels": Image()}})(split((12, 20)))
    with pytest.raises(fp.UserError, match="no column 'kind'"):
        fp.from_huggingface({"train": split((0, 12)), "test": tests})


def test_tests_that_number_classes_otherwise_are_renumbered_by_the_names():
    pairs = [(Pillow.fromarray(x), int(y)) for x, y in zip(IMAGES, LABELS, strict=True)]
    train, dogs = Items(pairs, classes=["ant", "cat", "dog"]), Items(pairs, classes=["cat", "dog"])
    np.testing.assert_array_equal(fp.from_torch(train, dogs).y_test, LABELS + 1)
    with pytest.raises(fp.UserError, match="the test set has a class ant that the training set has not"):
        fp.from_torch(dogs, train)
    with pytest.raises(fp.UserError, match="a test label is 1, and 1 classes are named: name all of them"):
        fp.from_torch(train, Items(pairs, classes=["cat"]))
    other = type("Other", (ClassLabel,), {"names": ("dog", "cat")})
    other.__name__ = "ClassLabel"
    tests = type("Rows", (Split,), {"features": Split.features | {"kind": other()}})(split((12, 20)))
    data = fp.from_huggingface({"train": split((0, 12)), "test": tests})
    np.testing.assert_array_equal(data.y_test, 1 - LABELS[12:])


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_groups_are_named(missing):
    rows = split((0, 20))
    rows[3]["writer"] = missing
    if missing is not None:
        for i, row in enumerate(rows):
            row["writer"] = missing if i == 3 else float(i % 3)
    with pytest.raises(fp.UserError, match="groups must be a number or name for each sample: fill in those that"):
        fp.from_huggingface(rows, groups="writer")


@pytest.mark.parametrize(
    "attributes",
    [
        {"data": [IMAGES[0], IMAGES[1][:3]], "targets": LABELS, "transform": print},
        {"data": [IMAGES[0], IMAGES[1][:3]], "targets": LABELS},
        {"data": IMAGES, "targets": None},
        {"data": IMAGES, "labels": {"a": 1}},
    ],
)
def test_attributes_that_are_no_arrays_are_passed_over(attributes):
    pairs = [(Pillow.fromarray(x), int(y)) for x, y in zip(IMAGES, LABELS, strict=True)]
    assert len(fp.from_torch(Unchanged(pairs, **attributes)).y_train) == 16


@pytest.mark.parametrize(
    "attributes",
    [
        {"classes": 2},
        {"classes": "cat"},
        {"info": "pets"},
        {"info": {"label": "kind"}},
        {"info": {"label": {0: "cat"}}},
    ],
)
def test_attributes_that_are_no_class_names_are_passed_over(attributes):
    pairs = [(Pillow.fromarray(x), int(y)) for x, y in zip(IMAGES, LABELS, strict=True)]
    assert fp.from_torch(Items(pairs, **attributes)).class_names is None
    named = Items(pairs, info={"label": {"0": "cat", "1": "dog"}})
    assert fp.from_torch(named).class_names == ("cat", "dog")
