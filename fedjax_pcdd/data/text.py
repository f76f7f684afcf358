"""Text by speaker as a classification problem: windows of characters, and the character after each as its label.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019 (Shakespeare). docs/data.md describes the file.
Letters: V characters in the vocabulary, T characters in a window, m speeches, n characters or windows.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedjax_pcdd.data.dataset import Dataset, as_groups
from fedjax_pcdd.data.memory import check_memory
from fedjax_pcdd.errors import UserError

KEYS = ("text", "speech_start", "speech_end", "speech_speaker")
OPTIONS = {"window": 80, "stride": 1}
TEST_SHARE = 10  # one window in ten


def is_text(names: Iterable[str]) -> bool:
    """Whether arrays of these names are a text rather than images."""
    return not {"x", "x_train", "x_train_delta"} & set(names) and bool(set(KEYS) & set(names))


def read_text(arrays: dict[str, np.ndarray], name: str) -> Dataset:
    """Make windows for every speaker who has enough text for a training and a test window.

    A speaker's speeches are joined by newlines (directly in a text without newlines) and cut into windows of T
    characters that begin every `stride` characters. The last tenth of the windows are the test set; windows before them
    that share a character with them, labels included, are left out. Classes are the characters of the whole text,
    sorted.

    Args:
      arrays: `text` [n] uint8; `speech_start`, `speech_end`, `speech_speaker` [m] integers; `window` (T, 80) and
        `stride` (1) if they differ from these defaults.
      name: the data set's name.

    Returns:
      A data set of windows, uint8 codes [n, T, 1, 1], with labels [n] in [0, V) and the speakers' numbers as groups.

    Raises:
      UserError: the arrays do not fit together, or no speaker has enough text.
    """
    _check(arrays)
    window, stride = (_option(arrays, key) for key in OPTIONS)
    vocabulary, codes = np.unique(arrays["text"], return_inverse=True)
    streams = _streams(arrays, codes.astype(np.uint8))
    parts = {speaker: split(stream, window, stride) for speaker, stream in streams.items()}
    parts = {speaker: (train, test) for speaker, (train, test) in parts.items() if len(train) and len(test)}
    if not parts:
        raise UserError(f"no speaker says enough for a training and a test window of {window} characters.")
    train, test = zip(*parts.values(), strict=True)
    (x_train, y_train, groups_train), (x_test, y_test, groups_test) = _stack(train, parts), _stack(test, parts)
    names = tuple(repr(bytes([code]))[2:-1] for code in vocabulary)
    return Dataset(name, x_train, y_train, x_test, y_test, len(names), names, groups_train, groups_test, text=True)


def split(stream: np.ndarray, window: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test windows [n, T + 1], labels last, of one speaker's text [n]; no character is in both."""
    if len(stream) <= window:
        empty = np.zeros((0, window + 1), stream.dtype)
        return empty, empty
    windows = sliding_window_view(stream, window + 1)[::stride]
    first_test = len(windows) - len(windows) // TEST_SHARE
    overlapping = -(-(window + 1) // stride) - 1
    return windows[: max(first_test - overlapping, 0)], windows[first_test:]


def last_windows(dataset: Dataset, rows: np.ndarray, sizes: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide clients' training windows: those to train on, and a share of each client's that is kept for validation.

    These are a client's last ones. Windows that share a character with one of them are in neither part.

    Args:
      rows: [n] positions of all clients' windows, one client after another.
      sizes: [K] how many each client has.

    Returns:
      Whether each of the n is trained on, and whether it is kept, [n] booleans.
    """
    owners, held, places = np.repeat(np.arange(len(sizes)), sizes), np.zeros(len(rows), bool), _places(dataset)[rows]
    order, left = np.lexsort((rows, owners)), np.repeat(np.cumsum(sizes), sizes) - np.arange(len(rows))
    held[order] = left <= np.floor(sizes * share + 0.5)[owners]
    ends = np.concatenate([[-np.inf], np.sort(places[held]), [np.inf]])
    after = np.searchsorted(ends, places)
    kept = np.minimum(ends[after] - places, places - ends[after - 1]) > dataset.x_train.shape[1]
    trained = np.bincount(owners[kept], minlength=len(sizes))
    held[order] &= left <= np.floor(trained * share / (1 - share) + 0.5)[owners]  # the share of what is left
    return kept, held


def _places(dataset: Dataset) -> np.ndarray:
    """Where the training windows of a text begin, [n] int64; windows that share a character are at most T apart.

    The file that says so is not needed: of two windows that follow each other within a speaker, the second begins where
    it continues the first, at the earliest such character.
    """
    count, length = dataset.x_train.shape[:2]
    windows = np.column_stack([dataset.x_train.reshape(count, length), dataset.y_train]).astype(dataset.x_train.dtype)
    steps, speakers = np.full(count, length + 1), dataset.groups_train
    left = np.arange(1, count) if speakers is None else 1 + np.flatnonzero(speakers[1:] == speakers[:-1])
    for step in range(1, length + 1):
        continues = (windows[left - 1, step:] == windows[left, : length + 1 - step]).all(1)
        steps[left[continues]], left = step, left[~continues]
    return np.cumsum(steps)


def _streams(arrays: dict[str, np.ndarray], codes: np.ndarray) -> dict[int, np.ndarray]:
    """The text of each speaker, as codes, by the speaker's number."""
    newline = codes[arrays["text"] == ord("\n")][:1]
    pieces: dict[int, list[np.ndarray]] = {}
    for start, end, speaker in zip(*(arrays[key].tolist() for key in KEYS[1:]), strict=True):
        pieces.setdefault(speaker, []).extend((codes[start:end], newline))
    return {speaker: np.concatenate(speeches[:-1]) for speaker, speeches in sorted(pieces.items())}


def _stack(parts: Sequence[np.ndarray], speakers: Iterable[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows [n, T, 1, 1], labels [n] and speakers [n] of the windows [m, T + 1] of each speaker."""
    sizes = list(map(len, parts))
    shape = sum(sizes), parts[0].shape[1] - 1
    check_memory("the windows", shape, parts[0].dtype, "store a larger stride in the file")
    joined = np.concatenate([windows[:, :-1] for windows in parts])[..., None, None]
    return joined, np.concatenate([windows[:, -1] for windows in parts]), as_groups(np.repeat(list(speakers), sizes))


def _check(arrays: dict[str, np.ndarray]):
    missing = [key for key in KEYS if key not in arrays]
    if missing:
        raise UserError(f"{missing[0]} is missing; a text needs {', '.join(KEYS)}.")
    text, start, end, _ = (arrays[key] for key in KEYS)
    if text.dtype != np.uint8 or text.ndim != 1 or len(np.unique(text)) < 2:
        raise UserError(f"text must be uint8 [n] with at least two characters, not {text.dtype} {list(text.shape)}.")
    for key in KEYS[1:]:
        if arrays[key].dtype.kind not in "iu" or arrays[key].shape != start.shape or start.ndim != 1:
            raise UserError("speech_start, speech_end and speech_speaker must give one integer a speech.")
    if ((start < 0) | (start > end) | (end > len(text))).any():
        raise UserError(f"speeches must begin before they end and lie within the {len(text)} characters of the text.")


def _option(arrays: dict[str, np.ndarray], key: str) -> int:
    value = arrays.get(key, np.asarray(OPTIONS[key]))
    if value.dtype.kind not in "iu" or value.ndim or not 1 <= value < 2**31:
        raise UserError(f"{key} must be one positive integer.")
    return int(value)
