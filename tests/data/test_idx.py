"""IDX files: what is read is what was written, and nothing else is read."""

import gzip
import os

import numpy as np
import pytest

from dure.data.idx import read_idx, read_idx_directory
from dure.errors import DataError
from tests.data.idx_files import NAMES, encode, write_data_set


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
    read = (train.images, train.labels, test.images, test.labels)
    assert all(map(np.array_equal, read, arrays.values()))


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


def test_what_is_no_idx_directory_or_no_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(DataError):
            read_idx_directory(path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(DataError, match="not a regular file"):
            read_idx(path, 3)
