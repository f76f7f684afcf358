"""Text by speaker: windows and labels, the character LSTM, and natural federations by speaker or writer."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import train

import fedjax_pcdd as fp
from fedjax_pcdd import models
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data import augment, memory, npz, sources
from fedjax_pcdd.data.federation import Federation, hold_out
from fedjax_pcdd.data.partition import natural
from fedjax_pcdd.data.text import read_text, split
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.models.lstm import LSTM
from fedjax_pcdd.training.build import default_model, federate
from fedjax_pcdd.training.config import build

DATA = Path(os.environ.get("PCDD_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
SPEECHES = ("abc bca ", "\ncab", "aabb")
SIZES = (14, 9, 20, 1)  # number of speeches of each speaker


def play_arrays(sizes=SIZES, window=8, stride=3):
    """Four speakers who take turns; the last says too little."""
    turns = [(k, SPEECHES[(k + i) % 3]) for i in range(max(sizes)) for k, n in enumerate(sizes) if i < n]
    starts = np.cumsum([0] + [len(speech) + 2 for _, speech in turns])[:-1]
    text = "".join("#" + speech + "\n" for _, speech in turns)
    return {
        "text": np.frombuffer(text.encode(), np.uint8),
        "speech_start": starts + 1,
        "speech_end": starts + 1 + [len(speech) for _, speech in turns],
        "speech_speaker": np.array([k for k, _ in turns]),
        "window": np.array(window),
        "stride": np.array(stride),
    }


def store_and_load(folder, arrays, name="play"):
    np.savez(folder / f"{name}.npz", **arrays)
    return sources.load(name, folder)


def speakers(dataset):
    """The speakers of the training and of the test windows."""
    return np.asarray(dataset.groups_train), np.asarray(dataset.groups_test)


@functools.cache
def federation():
    arrays = play_arrays()
    dataset = read_text(arrays, "play")
    return Federation(dataset, natural(speakers(dataset)))


def text_of(arrays, speaker):
    """A speaker's text, joined in plain Python."""
    speeches = zip(arrays["speech_start"], arrays["speech_end"], arrays["speech_speaker"], strict=True)
    return "\n".join(arrays["text"][s:e].tobytes().decode() for s, e, k in speeches if k == speaker)


# Windows


@pytest.mark.parametrize("stride", [1, 3, 20])
def test_windows_and_the_labels_after_them_are_from_one_speakers_text(stride):
    arrays = play_arrays((60, 50, 70, 1), stride=stride)
    dataset = read_text(arrays, "play")
    letters = sorted(set(arrays["text"].tobytes().decode()))
    window_speakers = speakers(dataset)
    assert set(window_speakers[0]) == {0, 1, 2}
    for x, y, groups in (
        (dataset.x_train, dataset.y_train, window_speakers[0]),
        (dataset.x_test, dataset.y_test, window_speakers[1]),
    ):
        for speaker in (0, 1, 2):
            text = text_of(arrays, speaker)
            expected = {text[i : i + 9] for i in range(0, len(text) - 8, stride)}
            rows = np.concatenate([x[groups == speaker].reshape(-1, 8), y[groups == speaker, None]], 1)
            assert {"".join(letters[c] for c in row) for row in rows} <= expected


def test_the_last_tenth_of_the_windows_is_the_test_set():
    parts = split(np.arange(111), 10, 1)
    assert [len(part) for part in parts] == [81, 10]
    np.testing.assert_array_equal(parts[1][-1], np.arange(100, 111))


@pytest.mark.parametrize("stride", [1, 2, 3, 9, 10, 11, 25])
def test_no_character_is_in_both_training_and_test_windows(stride):
    train, test = split(np.arange(997), 9, stride)
    assert train.max() < test.min()
    assert test.min() - train.max() <= stride


def test_a_text_shorter_than_a_window_gives_no_windows():
    assert [len(part) for part in split(np.arange(9), 9, 1)] == [0, 0]


def test_windows_that_do_not_fit_into_memory_are_refused_before_they_are_made(tmp_path, monkeypatch):
    store_and_load(tmp_path, play_arrays())
    monkeypatch.setattr(memory, "free_memory", lambda: 100)
    monkeypatch.setattr(npz, "check_memory", lambda *_: None)  # of the text itself
    with pytest.raises(
        UserError,
        match=r"play.npz cannot be used: the windows \[\d+, 8\] of uint8 needs .* a larger stride in the file",
    ):
        sources.load("play", tmp_path)


def test_speakers_who_say_too_little_are_left_out():
    assert np.unique(speakers(federation().dataset)[0]).tolist() == [0, 1, 2]


def test_classes_are_the_characters_of_the_text():
    dataset = federation().dataset
    assert (dataset.num_classes, dataset.class_names) == (6, ("\\n", " ", "#", "a", "b", "c"))


def test_by_default_a_window_of_80_characters_begins_at_every_character(tmp_path):
    arrays = {key: value for key, value in play_arrays((60, 0, 0, 0)).items() if key not in ("window", "stride")}
    dataset = store_and_load(tmp_path, arrays)
    assert (dataset.text, dataset.x_train.shape[1:], dataset.x_train.dtype) == (True, (80, 1, 1), np.uint8)
    np.testing.assert_array_equal(dataset.x_train[1:, 0], dataset.x_train[:-1, 1])


BROKEN = {
    "missing speakers": ({"speech_speaker": None}, "speech_speaker is missing; a text needs"),
    "missing text": ({"text": None}, "text is missing"),
    "a string": ({"text": np.array("abc")}, "text must be uint8"),
    "one character": ({"text": np.zeros(800, np.uint8)}, "at least two characters"),
    "uneven speeches": ({"speech_start": np.arange(3)}, "one integer a speech"),
    "float speeches": ({"speech_end": np.zeros(44)}, "one integer a speech"),
    "speeches beyond the end": ({"speech_end": np.full(44, 10**6)}, "lie within"),
    "speeches that end first": ({"speech_start": np.full(44, 90), "speech_end": np.full(44, 80)}, "lie within"),
    "no window": ({"window": np.array(0)}, "window must be one positive integer"),
    "wide strides": ({"stride": np.array([1, 2])}, "stride must be one positive integer"),
    "long windows": ({"window": np.array(10**6)}, "no speaker says enough"),
    "nothing known": (dict.fromkeys(play_arrays()) | {"other": np.zeros(3)}, "neither images .* nor a text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unsuitable_files_are_named_with_what_is_wrong(tmp_path, case):
    change, reason = BROKEN[case]
    arrays = {key: value for key, value in (play_arrays() | change).items() if value is not None}
    with pytest.raises(UserError, match=reason) as caught:
        store_and_load(tmp_path, arrays)
    assert str(tmp_path / "play.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_with_the_page_that_describes_it(tmp_path):
    with pytest.raises(UserError, match=r"shakespeare\.npz.*docs/data\.md"):
        sources.load("shakespeare", tmp_path)


# Pipeline and model


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_codes_reach_the_model_unchanged(dtype):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64, 1, 1)
    pipeline = augment.pipeline("shakespeare", True, (64, 1, 1), text=True)
    for training in (False, True):
        np.testing.assert_array_equal(augment.prepare(pipeline, codes, None, train=training, dtype=dtype), codes)


def test_the_number_of_weights_of_the_lstm_follows_its_formula():
    model = models.build("lstm", num_classes=65, image_shape=(80, 1, 1), text=True)
    lstm_weights = sum(4 * width * (inputs + width + 1) for inputs, width in ((8, 256), (256, 256)))
    assert models.sizes(model, (80, 1, 1)) == (65 * 8 + lstm_weights + 65 * 257, 813_897, 256, 65 * 257)


def narrow_lstm(*hidden):
    return Classifier(LSTM(6, hidden=hidden), num_classes=6)


@pytest.mark.thorough
def test_embeddings_start_with_a_standard_deviation_of_1():
    variables = LSTM(65, hidden=(2,)).init(jax.random.key(0), jnp.zeros((1, 3, 1, 1)))
    np.testing.assert_allclose(jnp.std(variables["params"]["embedding"]["embedding"]), 1, rtol=0.1)


@pytest.mark.thorough
def test_the_lstm_computes_the_textbook_equations():
    model, codes = narrow_lstm(5, 7), np.random.default_rng(0).integers(0, 6, (3, 7, 1, 1), dtype=np.uint8)
    variables = jax.tree.map(lambda w: w + 0.1, models.initialise(model, jax.random.key(0), (7, 1, 1)))
    params = jax.tree.map(np.asarray, variables["params"]["backbone"])
    x = params["embedding"]["embedding"][codes[..., 0, 0]]
    for name, width in (("lstm1", 5), ("lstm2", 7)):
        cell, c, h, states = params[name], np.zeros((3, width)), np.zeros((3, width)), []
        for t in range(7):
            gates = {
                g: x[:, t] @ cell[f"i{g}"]["kernel"] + h @ cell[f"h{g}"]["kernel"] + cell[f"h{g}"]["bias"]
                for g in "ifgo"
            }
            i, f, o = (1 / (1 + np.exp(-gates[g])) for g in "ifo")
            c = f * c + i * np.tanh(gates["g"])
            h = o * np.tanh(c)
            states.append(h)
        x = np.stack(states, 1)
    outputs, _ = jax.jit(lambda: models.forward(model, variables, jnp.asarray(codes), train=True))()
    np.testing.assert_allclose(outputs.features, x[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_bfloat16_tells_neighbouring_codes_apart():
    model = Classifier(LSTM(256, hidden=(7,), dtype=jnp.bfloat16), num_classes=3, dtype=jnp.bfloat16)
    variables = models.initialise(model, jax.random.key(0), (1, 1, 1))
    codes = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1)
    outputs, _ = jax.jit(lambda: models.forward(model, variables, jnp.asarray(codes), train=False))()
    assert outputs.logits.dtype == jnp.float32
    assert len(np.unique(outputs.features, axis=0)) == 256


@pytest.mark.parametrize(
    ("model", "text", "sentence"),
    [
        ("simple_cnn", True, "Model 'simple_cnn' reads images, not text: take lstm."),
        ("mlp", True, "Model 'mlp' reads images, not text: take lstm."),
        ("lstm", False, "Model 'lstm' reads text, not images: take mlp or mcmahan_cnn."),
    ],
)
def test_text_and_images_need_their_own_models(model, text, sentence):
    with pytest.raises(UserError) as caught:
        models.build(model, num_classes=6, image_shape=(8, 1, 1) if text else (4, 4, 1), text=text)
    assert str(caught.value).startswith(sentence[:-1])


def test_the_default_model_is_the_lstm_for_text_and_the_mlp_for_images():
    assert default_model(federation().dataset) == "lstm"
    assert default_model(sources.load("digits")) == "mlp"


# Federations


@functools.cache
def simulation(name, lanes=1):
    fed, method = federation(), METHODS[name]()
    pipeline = augment.pipeline("play", True, fed.image_shape, text=True)
    experiment = Experiment(fed, method, Local(1, 4, "drop", "sgd", 0.1), 0)
    return Simulation(
        method.build(narrow_lstm(7)),
        [experiment],
        pipeline=pipeline,
        cohort=3,
        execution=Execution(lanes=lanes),
        rounds=2,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedmr", "fedgela", "moon", "fedrep"])
def test_methods_train_every_weight_of_the_lstm(method):
    before = jax.tree.map(np.array, simulation(method).start().servers.variables["params"]["backbone"])
    state, _ = train(simulation(method), (0,))
    after = state.servers.variables["params"]["backbone"]
    moved = jax.tree.map(lambda a, b: bool((a != b).any() and np.isfinite(b).all()), before, after)
    assert all(jax.tree.leaves(moved))


@pytest.mark.thorough
def test_lanes_do_not_change_results():
    one_lane, two_lanes = (jax.tree.leaves(train(simulation("fedmr", lanes), (0, 1))[0]) for lanes in (1, 2))
    for a, b in zip(one_lane, two_lanes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedmr", marks=pytest.mark.slow)])
def test_a_natural_federation_trains_from_the_command_line(tmp_path, method):
    np.savez(tmp_path / "play.npz", **play_arrays(window=3, stride=6))
    options = ["--dataset=play", f"--data-dir={tmp_path}", "--partition=natural", "--clients=2", "--rounds=2"]
    short_run = ["--local-epochs=1", "--batch-size=8", "--lanes=1", "--fine-tune-epochs=0", "--quiet"]
    assert main([f"--method={method}", *options, *short_run, f"--run-dir={tmp_path / 'run'}"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert all(0 <= row["ga"] <= 1 and 0 <= row["pa"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model=simple_cnn"], "Model 'simple_cnn' reads images, not text: take lstm.\n"),
        (["--clients=4"], "'play' has 3 groups with training samples, not --clients=4: lower that.\n"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(tmp_path, capsys, options, sentence):
    np.savez(tmp_path / "play.npz", **play_arrays())
    folders = [f"--data-dir={tmp_path}", f"--run-dir={tmp_path / 'run'}"]
    assert main(["--dataset=play", "--partition=natural", *folders, *options]) == 2
    assert capsys.readouterr().err == sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("stride", "kept"), [(1, None), (3, None), (12, None), (1, 120)])
@pytest.mark.parametrize("kind", ["natural", "iid"])
def test_no_validation_window_shares_a_character_with_one_that_is_trained_on(kind, stride, kept):
    random = np.random.default_rng(0)
    text = random.integers(0, 20, 900, np.uint8)
    arrays = {"speech_start": np.array([0, 500]), "speech_end": np.array([500, 900]), "speech_speaker": np.arange(2)}
    data = read_text({"text": text, "window": np.array(8), "stride": np.array(stride), **arrays}, "play")
    starts = [stride * np.arange(sum(data.groups_train == k)) for k in (0, 1)]
    at = np.concatenate([starts[0], 500 + starts[1]])  # of each window in the text
    if kept is not None:
        rows = np.sort(random.permutation(len(at))[:kept])
        data, at = data.take(train=rows), at[rows]
    whole = fp.partition(data, kind, clients=2)
    federation = hold_out(whole, 0.2, 0)
    read = [{c for row in lists.flat for c in range(at[row], at[row] + 9)} for lists in
            (federation.partition.train, federation.validation)]  # fmt: skip
    assert not read[0] & read[1]
    shares = federation.validation.sizes / (federation.validation.sizes + federation.sizes)
    np.testing.assert_allclose(shares, 0.2, atol=0.5 / federation.sizes.min())
    assert federation.sizes.sum() + federation.validation.flat.size > len(at) - 2 * 2 * (9 + 2)
    np.testing.assert_array_equal(federation.partition.test.flat, whole.partition.test.flat)


def natural_sizes(folder, **options):
    np.savez(folder / "play.npz", **play_arrays())
    config, _ = build({"dataset": "play", "data_dir": folder, "partition": "natural"} | options)
    fed = federate(config)
    return fed.sizes.tolist(), fed.test_sizes.sum() == len(fed.dataset.y_test)


def test_natural_takes_every_speaker_or_those_with_the_most_windows(tmp_path):
    sizes, _ = natural_sizes(tmp_path)
    assert len(sizes) == 3
    smallest = sizes.index(min(sizes))
    assert natural_sizes(tmp_path, clients=2)[0] == sizes[:smallest] + sizes[smallest + 1 :]


def test_the_global_test_set_has_the_test_samples_of_the_clients_only(tmp_path):
    assert natural_sizes(tmp_path, clients=2)[1]


def test_the_default_number_of_clients_is_ten():
    assert build({})[0].clients == 10


# Real files


@functools.cache
def real_federation(name, **options):
    if not (DATA / f"{name}.npz").is_file():
        pytest.skip(f"{name}.npz is not in {DATA}; set PCDD_DATA")
    config, _ = build({"dataset": name, "data_dir": DATA, "partition": "natural"} | options)
    return federate(config)


@pytest.mark.thorough
def test_shakespeare_has_its_speakers_and_characters():
    fed = real_federation("shakespeare", clients=50)
    assert (fed.num_clients, fed.dataset.num_classes, fed.image_shape) == (50, 65, (80, 1, 1))
    assert (len(fed.dataset.y_train), len(fed.dataset.y_test)) == (639_323, 71_459)


def test_femnist_by_writer_suits_the_cnn():
    fed = real_federation("femnist")
    assert fed.num_clients == 105
    model = models.build("mcmahan_cnn", num_classes=fed.dataset.num_classes, image_shape=fed.image_shape)
    assert models.sizes(model, fed.image_shape).features == 512
