"""Tasks by domain and public images."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest

from fedjax_pcdd.data import augment, domain_shifts, domains, sources
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.domain_shifts import resize
from fedjax_pcdd.data.domains import TASKS, load_public, load_public_labels, load_task
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.build import public_images
from fedjax_pcdd.training.config import RunConfig

DATA = Path(os.environ.get("PCDD_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
OFFICE = TASKS["office_caltech10"].domains


@functools.cache
def builtin_task(seed=0):
    return load_task("digits_domains", seed=seed)


@functools.cache
def real_task(name, seed=0):
    files = TASKS[name].domains if TASKS[name].layout == "files" else (name,)
    if not all((DATA / f"{file}.npz").is_file() for file in files):
        pytest.skip(f"{', '.join(files)} not in {DATA}; set PCDD_DATA")
    return load_task(name, DATA, seed=seed)


def numbered(n, shape=(8, 8, 3)):
    """Images whose first two pixels encode their number."""
    images = np.zeros((n, *shape), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = np.arange(n) % 256, np.arange(n) // 256
    return images


def numbers(images):
    low, high = images[:, 0, :2, 0].astype(int).T
    return low + 256 * high


def archive(names=OFFICE, per_class=10, num_classes=10):
    n = len(names) * num_classes * per_class
    return {
        "x": numbered(n),
        "y": np.arange(n) // per_class % num_classes,
        "domain": np.arange(n) // (num_classes * per_class),
        "domains": np.array(names),
    }


def store_and_load_archive(folder, arrays, name="office_caltech10", seed=0, split="held_out"):
    np.savez(folder / f"{name}.npz", **arrays)
    return load_task(name, folder, side=8, seed=seed, split=split)


def store_files(folder, names, sizes, labels=10, channels=1):
    for name, size in zip(names, sizes, strict=True):
        x, y = numbered(size, (8, 8, channels)), np.arange(size) % labels
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# Built-in digits


def test_the_tenths_of_the_digits_are_stratified():
    _, labels, slots = domain_shifts.digit_slots()
    counts = np.array([np.bincount(labels[slots == slot], minlength=10) for slot in range(10)])
    assert np.ptp(counts, axis=0).max() == 1


def test_all_parts_together_have_every_digit_once(monkeypatch):
    """With shifts that change nothing, all images of all parts together are the 1797 digits, each once."""
    plain = domain_shifts.DOMAIN_SHIFTS["plain"]
    monkeypatch.setattr(domain_shifts, "PUBLIC_SHIFTS", {"plain": plain})
    for name in domain_shifts.DOMAIN_SHIFTS:
        monkeypatch.setitem(domain_shifts.DOMAIN_SHIFTS, name, plain)
    domain_images = [domain_shifts.shifted_digits(name, 8)[::2] for name in domain_shifts.DOMAIN_SHIFTS]
    used = np.concatenate([*(x for domain in domain_images for x in domain), domain_shifts.public_digits(8)])
    digits = sources.load("digits")
    stored = np.concatenate([digits.x_train, digits.x_test])
    assert sorted(image.tobytes() for image in used[..., 0]) == sorted(image.tobytes() for image in stored)


@pytest.mark.thorough
def test_the_seed_does_not_change_the_test_images():
    assert all(same(a[3:], b[3:]) for a, b in zip(builtin_task(0).domains, builtin_task(1).domains, strict=True))


def test_all_shifts_look_different():
    """Any two shifts of the same images differ by more than 10 of 255 grey levels on average."""
    images = sources.load("digits").x_train[:50]
    shifts = {**domain_shifts.DOMAIN_SHIFTS, **domain_shifts.PUBLIC_SHIFTS}
    results = [domain_shifts._shifted(shift, images, side=16, seed=0).astype(int) for shift in shifts.values()]
    gaps = [np.abs(a - b).mean() for i, a in enumerate(results) for b in results[:i]]
    assert min(gaps) > 10


def test_a_rotated_picture_is_turned_clockwise_by_40_degrees_and_a_fifth_smaller():
    picture = np.zeros((1, 65, 65))
    picture[0, 31:34, 51:54] = 1  # 20 pixels to the right of the middle
    turned = domain_shifts.DOMAIN_SHIFTS["rotated"](picture, np.random.default_rng(0))[0]
    row, column = (np.indices(turned.shape) * turned).sum((1, 2)) / turned.sum() - 32
    np.testing.assert_allclose([np.hypot(row, column), np.degrees(np.arctan2(row, column))], [16, 40], atol=0.5)


def test_a_fifth_of_the_pixels_of_a_noisy_picture_is_black_or_white():
    noisy = domain_shifts.PUBLIC_SHIFTS["noisy"](np.full((4, 64, 64), 0.5), np.random.default_rng(0))
    np.testing.assert_allclose([(noisy == 0).mean(), (noisy == 1).mean()], [0.1, 0.1], atol=0.01)


def test_shifted_pictures_are_rounded_to_the_nearest_level():
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    inverted = domain_shifts._shifted(domain_shifts.DOMAIN_SHIFTS["inverted"], levels, side=16, seed=0)
    np.testing.assert_array_equal(inverted, np.repeat(255 - levels, 3, axis=3))


def test_digits_domains_have_the_stated_sizes_and_types():
    task = builtin_task()
    assert (private_sizes(task), task.side, task.recipe.top, task.recipe.num_classes) == ((150,) * 4, 16, 1, 10)
    for domain in task.domains:
        assert domain.x_train.shape == (150, 16, 16, 3)
        assert domain.x_test.shape == (len(domain.y_test), 16, 16, 3)
        assert domain.x_train.dtype == domain.x_test.dtype == np.uint8
        assert domain.y_train.dtype == domain.y_test.dtype == np.int32


def test_images_have_the_requested_side():
    assert load_task("digits_domains", seed=0, side=32).domains[3].x_test.shape[1:] == (32, 32, 3)


def test_the_same_seed_gives_the_same_task():
    second = load_task("digits_domains", seed=0)
    assert all(same(a[1:], b[1:]) for a, b in zip(builtin_task().domains, second.domains, strict=True))


def test_another_seed_draws_other_private_images():
    assert not np.array_equal(builtin_task(0).domains[0].x_train, builtin_task(1).domains[0].x_train)


def test_private_images_keep_their_labels(tmp_path):
    store_files(tmp_path, ("mnist", "usps"), (200, 100))
    for domain in load_task("digits2", tmp_path, seed=3, side=8).domains:
        np.testing.assert_array_equal(domain.y_train, numbers(domain.x_train) % 10)


# One file for each domain


def test_private_images_are_drawn_without_repetition(tmp_path):
    store_files(tmp_path, ("mnist", "usps"), (200, 100))
    task = load_task("digits2", tmp_path, seed=0, side=8)
    assert [len(set(numbers(domain.x_train))) for domain in task.domains] == [150, 80]
    assert private_sizes(task) == (150, 80)


def test_digits_have_the_published_private_images_and_local_epochs():
    recipe = TASKS["digits"]
    published = {"mnist": (150, 40), "usps": (80, 35), "svhn": (5000, 3), "syn": (1800, 4)}
    assert dict(zip(recipe.domains, zip(recipe.private, recipe.local_epochs, strict=True), strict=True)) == published


def test_digits_and_digits2_draw_the_same_private_images(tmp_path):
    store_files(tmp_path, TASKS["digits"].domains, (200, 100, 5001, 1801))
    digits, digits2 = (load_task(name, tmp_path, seed=5, side=8) for name in ("digits", "digits2"))
    assert private_sizes(digits) == (150, 80, 5000, 1800)
    assert all(same(a[1:], b[1:]) for a, b in zip(digits.domains, digits2.domains, strict=False))


def test_missing_domains_are_all_named(tmp_path):
    store_files(tmp_path, ("mnist", "usps"), (200, 100))
    with pytest.raises(UserError, match=r"'digits' lacks svhn\.npz, syn\.npz") as caught:
        load_task("digits", tmp_path, seed=0)
    assert "x_train, y_train, x_test and y_test" in str(caught.value)


def test_too_few_training_images_are_named(tmp_path):
    store_files(tmp_path, ("mnist", "usps"), (200, 79))
    with pytest.raises(UserError, match="'usps' needs 80 training images but has 79"):
        load_task("digits2", tmp_path, seed=0)


def test_labels_out_of_range_are_named(tmp_path):
    store_files(tmp_path, ("mnist", "usps"), (200, 100), labels=11)
    with pytest.raises(UserError, match="labels from 0 to 9"):
        load_task("digits2", tmp_path, seed=0)


def test_an_unsupported_number_of_channels_is_named(tmp_path):
    store_files(tmp_path, ("mnist", "usps"), (200, 100), channels=2)
    with pytest.raises(UserError, match="1 or 3 channels, not 2"):
        load_task("digits2", tmp_path, seed=0)


# One file without a split


def test_three_tenths_of_each_class_are_held_out(tmp_path):
    for domain in store_and_load_archive(tmp_path, archive(per_class=13)).domains:
        np.testing.assert_array_equal(np.bincount(domain.y_test), [3] * 10)
        np.testing.assert_array_equal(np.bincount(domain.y_train), [10] * 10)


def test_held_out_images_are_never_private(tmp_path):
    arrays = archive()
    task = store_and_load_archive(tmp_path, arrays)
    used = np.concatenate([numbers(x) for domain in task.domains for x in (domain.x_train, domain.x_test)])
    np.testing.assert_array_equal(np.sort(used), np.arange(len(arrays["x"])))


def test_every_domain_gets_its_own_images_and_labels(tmp_path):
    arrays = archive()
    order = np.random.default_rng(0).permutation(len(arrays["x"]))
    shuffled = {key: value[order] if key != "domains" else value for key, value in arrays.items()}
    for position, domain in enumerate(store_and_load_archive(tmp_path, shuffled).domains):
        rows = numbers(domain.x_train)
        assert set(arrays["domain"][rows]) == {position}
        np.testing.assert_array_equal(domain.y_train, arrays["y"][rows])


def test_the_seed_chooses_the_held_out_images(tmp_path):
    first, second = (store_and_load_archive(tmp_path, archive(), seed=seed).domains[0] for seed in (0, 1))
    assert not np.array_equal(first.x_test, second.x_test)


def private_sizes(task):
    """Number of private images of each domain."""
    return tuple(len(domain.y_train) for domain in task.domains)


@pytest.fixture(scope="module")
def office_home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    arrays = archive(TASKS["office_home"].domains, per_class=60, num_classes=65)
    order = np.random.default_rng(0).permutation(len(arrays["y"]))
    arrays |= {name: arrays[name][order] for name in ("x", "y", "domain")}
    return {split: store_and_load_archive(folder, arrays, "office_home", split=split) for split in ("held_out", "code")}


def test_office_home_has_the_published_sizes(office_home):
    task = office_home["held_out"]
    assert (private_sizes(task), task.recipe.local_epochs) == ((1400, 2000, 2500, 2000), (10, 6, 6, 6))
    assert (task.recipe.top, task.recipe.public_epochs, task.recipe.public) == (5, 2, "cifar100")


def test_office_home_has_private_images_of_all_classes_by_default(office_home):
    for domain in office_home["held_out"].domains:
        assert len(np.unique(domain.y_train)) == 65


def test_the_code_split_tests_on_the_whole_domain(office_home):
    for domain in office_home["code"].domains:
        assert len(domain.y_test) == 65 * 60
        assert set(numbers(domain.x_train)) < set(numbers(domain.x_test))


def test_the_code_split_takes_the_first_classes(office_home):
    """1400 images fill 33 classes of 42 images each and a third of the next class."""
    labels = office_home["code"].domains[0].y_train
    np.testing.assert_array_equal(np.bincount(labels), [42] * 33 + [14])
    assert np.all(np.diff(labels) >= 0)


BROKEN = {
    "no labels": ({"y": None}, "it lacks y;"),
    "no names": ({"domain": None, "domains": None}, "it lacks domain, domains;"),
    "float images": ({"x": np.zeros((400, 8, 8, 3))}, "x must be uint8"),
    "no channels": ({"x": np.zeros((400, 8, 8), np.uint8)}, "x must be uint8"),
    "short labels": ({"y": np.zeros(399, int)}, r"y must be integers \[400\]"),
    "float domains": ({"domain": np.zeros(400)}, r"domain must be integers \[400\]"),
    "too many classes": ({"y": np.full(400, 10)}, r"y must lie in \[0, 10\), not from 10 to 10"),
    "other names": ({"domains": np.array(["amazon", "dslr", "x", "y"])}, "no images of caltech10, webcam"),
    "an empty domain": ({"domain": np.zeros(400, int)}, "no images of caltech10, dslr, webcam"),
    "objects": ({"y": np.array([None] * 400)}, "not a readable npz archive"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unsuitable_archives_are_named_with_what_is_wrong(tmp_path, case):
    change, reason = BROKEN[case]
    arrays = {key: value for key, value in (archive() | change).items() if value is not None}
    with pytest.raises(UserError, match=reason) as caught:
        store_and_load_archive(tmp_path, arrays)
    assert str(tmp_path / "office_caltech10.npz") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut", b"\x93NUMPY", b"\x80\x04."])
def test_files_that_are_no_archive_are_refused(tmp_path, content):
    (tmp_path / "office_home.npz").write_bytes(content)
    with pytest.raises(UserError, match="not a readable npz archive"):
        load_task("office_home", tmp_path, seed=0)


def test_a_single_array_is_refused(tmp_path):
    with open(tmp_path / "office_home.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="not a readable npz archive"):
        load_task("office_home", tmp_path, seed=0)


def test_damaged_bytes_are_refused_or_change_nothing(tmp_path):
    np.savez_compressed(tmp_path / "mine.npz", x=np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8))
    content = np.frombuffer((tmp_path / "mine.npz").read_bytes(), np.uint8)
    expected = load_public("mine", tmp_path, samples=4, seed=0, side=8)
    refused = 0
    for position in range(0, len(content), 7):
        damaged = content.copy()
        damaged[position] ^= 255
        (tmp_path / "mine.npz").write_bytes(damaged.tobytes())
        try:
            np.testing.assert_array_equal(load_public("mine", tmp_path, samples=4, seed=0, side=8), expected)
        except UserError:
            refused += 1
    assert refused > 100


def test_a_missing_archive_is_named_with_its_layout(tmp_path):
    with pytest.raises(UserError, match=r"lacks office_home\.npz in .*with x, y, domain and domains"):
        load_task("office_home", tmp_path, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("digit_domains", {}, "did you mean 'digits_domains'"),
        ("office_home", {"split": "cod"}, "did you mean 'code'"),
        ("office_caltech10", {"split": "code"}, "office_home only"),
        ("digits_domains", {"seed": -1}, "seed must be 0 or more"),
        ("digits_domains", {"side": 4}, "at least 8 pixels"),
    ],
)
def test_wrong_options_are_refused_with_one_sentence(name, options, sentence):
    with pytest.raises(UserError, match=sentence):
        load_task(name, **({"seed": 0} | options))


# Public images


def test_public_digits_need_no_files():
    images = load_public("digits_public", samples=builtin_task().recipe.public_samples, seed=0, side=16)
    assert (images.shape, images.dtype) == ((1000, 16, 16, 3), np.uint8)


def test_public_images_of_ones_own_may_be_small_but_digits_cannot_be_read_then(tmp_path):
    np.savez(tmp_path / "mine.npz", x_train=numbered(40))
    assert load_public("mine", tmp_path, samples=9, seed=0, side=5).shape == (9, 5, 5, 3)
    with pytest.raises(UserError, match="at least 8 pixels"):
        load_public("digits_public", samples=9, seed=0, side=5)


@pytest.mark.parametrize("arrays", [{"x_train": numbered(40)}, {"x": numbered(40)}], ids=["x_train", "x"])
def test_public_images_need_no_labels(tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    for name in ("mine", str(tmp_path / "mine.npz")):
        drawn = numbers(load_public(name, tmp_path, samples=30, seed=0, side=8))
        assert len(set(drawn)) == 30


@pytest.mark.parametrize("dtype", [int, float])
@pytest.mark.parametrize("keys", [("x_train", "y_train"), ("x", "y")])
def test_public_labels_are_those_of_the_drawn_images(tmp_path, monkeypatch, keys, dtype):
    images = numbered(40)
    np.savez(tmp_path / "mine.npz", **dict(zip(keys, (images, numbers(images).astype(dtype)), strict=True)))
    options = {"samples": 30, "seed": 3}
    drawn = load_public("mine", tmp_path, side=8, **options)
    monkeypatch.setattr(domains, "read_images", None)  # labels do not need the images
    for name in ("mine", str(tmp_path / "mine.npz")):
        np.testing.assert_array_equal(load_public_labels(name, tmp_path, **options), numbers(drawn))


@pytest.mark.thorough
def test_the_built_in_public_digits_have_labels():
    labels = load_public_labels("digits_public", samples=1000, seed=0)
    assert np.bincount(labels).min() > 70
    seed_0, seed_1 = (load_public_labels("digits_public", samples=10, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(seed_0, labels[:10])
    assert not np.array_equal(seed_0, seed_1)


def federation_of_shape(*shape, text=False):
    x, y = np.zeros((2, *shape), np.uint8), np.arange(2)
    return Federation(Dataset("mine", x, y, x, y, num_classes=2, text=text), Partition(([0], [1]), ([0], [1])))


@pytest.mark.parametrize(
    ("shape", "text", "private"),
    [((16, 12, 3), False, "images of 16x12x3"), ((8, 8, 4), False, "images of 8x8x4"), ((80, 1, 1), True, "a text")],
)
def test_public_images_are_refused_beside_samples_of_another_kind(tmp_path, shape, text, private):
    np.savez(tmp_path / "mine.npz", x_train=np.zeros((5, 8, 8, 3), np.uint8))
    config = RunConfig(public="mine", data_dir=tmp_path, public_samples=3)
    with pytest.raises(UserError, match=f"the clients have {private}"):
        public_images(config, federation_of_shape(*shape, text=text))


def test_the_draw_of_public_images_does_not_depend_on_how_their_file_is_named(tmp_path):
    x, y = numbered(40), np.arange(40)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    drawn = [load_public(name, tmp_path, samples=9, seed=0) for name in ("mine", str(tmp_path / "mine.npz"))]
    np.testing.assert_array_equal(*drawn)


def test_public_images_become_grey_as_the_mean_of_their_colours(tmp_path):
    np.savez(tmp_path / "mine.npz", x_train=np.full((5, 8, 8, 3), [10, 20, 61], np.uint8))
    config = RunConfig(public="mine", data_dir=tmp_path, public_samples=3)
    grey, colour = (public_images(config, federation_of_shape(8, 8, channels)) for channels in (1, 3))
    assert (grey.shape, grey.dtype, np.unique(grey).tolist()) == ((3, 8, 8, 1), np.uint8, [30])
    assert np.unique(colour).tolist() == [10, 20, 61]


@pytest.mark.parametrize("labels", [{}, {"y": np.arange(39)}, {"y": np.full(40, 0.5)}], ids=["none", "fewer", "halves"])
def test_missing_or_unsuitable_public_labels_are_refused(tmp_path, labels):
    np.savez(tmp_path / "mine.npz", x=numbered(40), **labels)
    with pytest.raises(UserError, match=r"has no labels of its images: add y_train to it|y of .* must be one integer"):
        load_public_labels("mine", tmp_path, samples=30, seed=0)


def test_a_public_file_without_images_says_so(tmp_path):
    np.savez(tmp_path / "mine.npz", x=numbered(0), y=np.arange(0))
    assert len(load_public_labels("mine", tmp_path, samples=30, seed=0)) == 0
    with pytest.raises(UserError, match="'mine' has 0 images"):
        load_public("mine", tmp_path, samples=30, seed=0, side=8)


def test_loading_public_images_does_not_read_their_labels(tmp_path):
    """Reading the labels would fail, as they are pickled objects."""
    np.savez(tmp_path / "mine.npz", x_train=numbered(40), y_train=np.array([None] * 40))
    assert load_public("mine", tmp_path, samples=40, seed=0, side=8).shape == (40, 8, 8, 3)


def test_public_images_may_be_delta_coded(tmp_path):
    delta = np.zeros((5, 3, 8, 8), np.uint8)
    delta[..., 0] = 7
    np.savez(tmp_path / "mine.npz", x_train_delta=delta)
    images = load_public("mine", tmp_path, samples=5, seed=0, side=8)
    np.testing.assert_array_equal(images, np.broadcast_to([14, 7, 14], (5, 8, 8, 3)))


def test_the_seed_decides_which_public_images_are_drawn(tmp_path):
    np.savez(tmp_path / "mine.npz", x=numbered(40))
    first, again, other = (load_public("mine", tmp_path, samples=9, seed=seed, side=8) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("samples", [0, 41])
def test_an_impossible_number_of_public_samples_is_refused(tmp_path, samples):
    np.savez(tmp_path / "mine.npz", x=numbered(40))
    with pytest.raises(UserError, match="'mine' has 40 images"):
        load_public("mine", tmp_path, samples=samples, seed=0)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y_train": np.zeros(4)}, "holds no images"),
        ({"x": np.zeros((4, 8, 8, 3))}, "x must be uint8"),
        ({"x_train_delta": np.zeros((4, 8, 8, 3), np.uint8)}, r"x_train_delta must be uint8 \[n, 3, H, W\]"),
    ],
)
def test_unsuitable_public_files_are_named(tmp_path, arrays, sentence):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=sentence):
        load_public("mine", tmp_path, samples=4, seed=0)


def test_a_missing_public_set_is_named(tmp_path):
    with pytest.raises(UserError, match="'cifar100' was not found"):
        load_public("cifar100", tmp_path, seed=0)


def test_the_stored_subset_of_cifar100_is_proposed_where_cifar100_is_missing(tmp_path):
    np.savez(tmp_path / "cifar100_subset.npz", x=numbered(40))
    with pytest.raises(UserError, match="name cifar100_subset as the public data set"):
        load_public("cifar100", tmp_path, seed=0)


def test_tiny_imagenet_is_cut_and_not_resized(tmp_path):
    image = np.arange(20 * 20 * 3).reshape(1, 20, 20, 3) % 251
    np.savez(tmp_path / "tiny_imagenet.npz", x=np.repeat(image, 6, axis=0).astype(np.uint8))
    windows = np.lib.stride_tricks.sliding_window_view(image[0].astype(np.uint8), (8, 8, 3)).reshape(-1, 8, 8, 3)
    possible = {window.tobytes() for window in windows}
    images = load_public("tiny_imagenet", tmp_path, samples=6, seed=0, side=8)
    drawn = {window.tobytes() for window in images}
    assert drawn < possible
    assert len(drawn) > 1
    by_path = load_public(str(tmp_path / "tiny_imagenet.npz"), tmp_path, samples=6, seed=0, side=8)
    np.testing.assert_array_equal(by_path, images)


def test_a_window_may_lie_at_every_edge_of_its_image():
    images = np.arange(81, dtype=np.uint8).reshape(1, 9, 9, 1).repeat(100, axis=0)
    corners = domain_shifts.windows(images, 8, np.random.default_rng(0))[:, 0, 0, 0]
    assert set(corners.tolist()) == {0, 1, 9, 10}


def test_tiny_images_must_hold_a_window(tmp_path):
    np.savez(tmp_path / "tiny_imagenet.npz", x=numbered(40))
    with pytest.raises(UserError, match="too small for windows of 32x32"):
        load_public("tiny_imagenet", tmp_path, samples=6, seed=0)


# Pixels


def test_images_of_the_right_size_are_not_changed():
    images = np.random.default_rng(0).integers(0, 256, (3, 9, 9, 3), dtype=np.uint8)
    np.testing.assert_array_equal(domain_shifts.resize(images, 9), images)


def test_resizing_is_bilinear_between_pixel_centres():
    """Twice the size: new pixels lie a quarter and three quarters of the way between old ones."""
    image = np.array([0, 100, 200, 40], np.uint8).reshape(1, 1, 4, 1).repeat(4, axis=1)
    row = domain_shifts.resize(image, 8)[0, 3]
    np.testing.assert_array_equal(row, np.repeat([[0], [25], [75], [125], [175], [160], [80], [40]], 3, axis=1))


def test_private_images_are_normalised_by_the_constants_of_imagenet():
    pipeline = augment.DOMAIN_PIPELINE
    assert not pipeline.random
    assert (pipeline.mean, pipeline.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("name", ["cifar100", "cifar100_subset"])
def test_public_cifar100_has_the_pipeline_of_cifar100(name):
    assert augment.public_pipeline(name) == augment.pipeline("cifar100", True, (32, 32, 3))


@pytest.mark.parametrize("name", ["fashion_mnist", "tiny_imagenet", "cifar10", "cifar100_mine"])
def test_other_public_sets_have_cifar100_augmentation_and_imagenet_constants(name):
    pipeline = augment.public_pipeline(name)
    assert (pipeline.mean, pipeline.std) == (augment.DOMAIN_PIPELINE.mean, augment.DOMAIN_PIPELINE.std)
    assert (pipeline.crop, pipeline.padding, pipeline.flip, pipeline.rotate) == ("zero", 4, True, 15.0)


def test_the_border_of_public_images_is_an_eighth_of_their_side():
    assert augment.public_pipeline("digits_public", 16).padding == 2


# Real files


@pytest.mark.thorough
def test_digits2_tests_on_the_full_test_sets():
    task = real_task("digits2")
    assert [domain.x_test.shape for domain in task.domains] == [(10000, 32, 32, 3), (2007, 32, 32, 3)]
    assert private_sizes(task) == (150, 80)


def test_every_image_of_office_caltech10_is_used():
    task = real_task("office_caltech10")
    test_sizes = [len(domain.y_test) for domain in task.domains]
    assert [a + b for a, b in zip(private_sizes(task), test_sizes, strict=True)] == [958, 1123, 157, 295]


@pytest.mark.thorough
def test_public_fashion_mnist_is_resized_and_replicated():
    if not (DATA / "fashion_mnist.npz").is_file():
        pytest.skip(f"fashion_mnist.npz is not in {DATA}; set PCDD_DATA")
    images = load_public("fashion_mnist", DATA, seed=0)
    assert images.shape == (5000, 32, 32, 3)
    np.testing.assert_array_equal(images[..., 0], images[..., 2])


@pytest.mark.parametrize("side", [16, 32])
def test_images_that_are_not_uint8_are_refused(side):
    with pytest.raises(UserError, match=r"must be uint8 in \[0, 255\], not float32"):
        resize(np.zeros((2, side, side, 3), np.float32), 32)
