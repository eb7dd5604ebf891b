"""IDX files: what is read is what was written, and nothing else is read."""

import gzip
import struct

import numpy as np
import pytest
import torch

from dure.data import digits, idx
from dure.data.idx import read_idx, read_idx_directory
from dure.data.images import load_digits, load_idx
from dure.errors import DataError

NAMES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "t10k-images": "t10k-images-idx3-ubyte",
    "t10k-labels": "t10k-labels-idx1-ubyte",
}


def encode(array):
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_data_set(directory, spell=lambda name: name, pack=lambda data: data):
    """Write a small, valid data set; return its arrays by stem."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images": rng.integers(0, 256, (12, 5, 4), dtype=np.uint8),
        "train-labels": np.arange(12, dtype=np.uint8) % 3,
        "t10k-images": rng.integers(0, 256, (6, 5, 4), dtype=np.uint8),
        "t10k-labels": np.arange(6, dtype=np.uint8) % 4,
    }
    for stem, array in arrays.items():
        (directory / spell(NAMES[stem])).write_bytes(pack(encode(array)))
    return arrays


@pytest.mark.parametrize(
    ("spell", "pack"),
    [
        (lambda n: n, lambda d: d),
        (lambda n: n + ".gz", gzip.compress),
        (lambda n: n.replace("-idx", ".idx"), lambda d: d),
        (lambda n: n.replace("-idx", ".idx") + ".gz", gzip.compress),
        (lambda n: n, gzip.compress),
        (lambda n: n + ".gz", lambda d: d),
    ],
    ids=["dash", "dash-gz", "dot", "dot-gz", "zipped-without-ending", "plain-with-ending"],
)
def test_idx_directory_of_any_spelling_is_read(tmp_path, spell, pack):
    arrays = write_data_set(tmp_path, spell, pack)
    train, test = read_idx_directory(tmp_path)
    assert np.array_equal(train.images, arrays["train-images"])
    assert np.array_equal(train.labels, arrays["train-labels"])
    assert np.array_equal(test.images, arrays["t10k-images"])
    assert np.array_equal(test.labels, arrays["t10k-labels"])


def test_load_idx_gives_images_from_zero_to_one(tmp_path):
    arrays = write_data_set(tmp_path)
    data = load_idx(tmp_path)
    assert data.train.pixels.shape == (12, 1, 5, 4)
    assert data.num_classes == 4
    pixels, label = data.train[7]
    assert label == arrays["train-labels"][7]
    assert torch.equal(pixels[0], torch.tensor(arrays["train-images"][7]) / 255)


def _zeros(*shape):
    return encode(np.zeros(shape, np.uint8))


BAD = {
    "foreign": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "empty file": b"",
    "labels in place of images": _zeros(12),
    "other type of number": b"\x00\x00\x0d\x03" + _zeros(12, 5, 4)[4:],
    "header cut": _zeros(12, 5, 4)[:9],
    "one byte short": _zeros(12, 5, 4)[:-1],
    "one byte long": _zeros(12, 5, 4) + b"\0",
    "no images": _zeros(0, 5, 4),
    "dimensions beyond any memory": bytes((0, 0, 8, 3)) + b"\xff" * 12 + bytes(100),
    "gzip of something foreign": gzip.compress(b"hello"),
    "gzip cut": gzip.compress(_zeros(12, 5, 4))[:-12],
    "gzip of a cut file": gzip.compress(_zeros(12, 5, 4)[:-1]),
    "gzip with a broken sum": gzip.compress(_zeros(12, 5, 4))[:-8] + bytes(8),
    "gzip with a broken stream": gzip.compress(_zeros(12, 5, 4))[:10] + b"\xff" * 40,
    "labels for another count": _zeros(11, 5, 4),
    "another size than the test images": _zeros(12, 4, 5),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_idx_file_that_is_not_right_is_one_line_naming_it(tmp_path, content):
    write_data_set(tmp_path)
    path = tmp_path / NAMES["train-images"]
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx_directory(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("stem", NAMES)
def test_idx_file_that_is_missing_is_named(tmp_path, stem):
    write_data_set(tmp_path)
    (tmp_path / NAMES[stem]).unlink()
    with pytest.raises(DataError) as caught:
        read_idx_directory(tmp_path)
    assert stem in caught.value.what


def test_idx_directory_that_is_missing_or_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(DataError):
            read_idx_directory(path)


def test_idx_file_that_is_a_directory_is_refused(tmp_path):
    with pytest.raises(DataError):
        read_idx(tmp_path, 3)


def test_idx_longer_than_a_piece_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "_PIECE_BYTES", 7)
    arrays = write_data_set(tmp_path)
    assert np.array_equal(read_idx_directory(tmp_path)[0].images, arrays["train-images"])


def test_digits_are_real_images_split_without_overlap():
    data = load_digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.train.pixels.shape[1:] == (1, 8, 8)
    assert (data.train.pixels.min(), data.train.pixels.max()) == (0, 1)
    assert set(data.train.labels.tolist()) == set(range(10)) == set(data.test.labels.tolist())


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_digits()
    assert "'.[demo]'" in caught.value.fix
