"""Text: vocabulary, splits, windows, and the sources that are read."""

from pathlib import Path

import pytest
import torch

from dure.data import Vocabulary, Windows, load_python_sources, read_python_sources
from dure.errors import DataError, UsageError


def test_vocabulary_gives_back_what_it_encoded():
    text = "def f(x):\n\treturn x + 'é'\n"
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert tokens.dtype == torch.uint8
    assert len(vocabulary) == len(set(text)) + 1
    assert vocabulary.decode(tokens) == text


def test_vocabulary_keeps_the_most_frequent_and_shares_number_0():
    vocabulary = Vocabulary.of("aaabbbccd", max_size=3)
    assert len(vocabulary) == 3
    assert vocabulary.encode("abcdz\U0001f600\ud800").tolist() == [1, 2, 0, 0, 0, 0, 0]
    assert vocabulary.decode(torch.tensor([2, 1, 0])) == "ba\ufffd"


def test_vocabulary_with_a_character_twice_is_refused():
    with pytest.raises(UsageError):
        Vocabulary("aba")


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_windows_are_whole_and_shifted_by_one(tokens: int, count: int):
    windows = Windows(tokens=torch.arange(tokens), length=4)
    assert len(windows) == count
    seen = [windows[i] for i in range(count)]
    for i, (x, y) in enumerate(seen):
        assert x.tolist() == list(range(4 * i, 4 * i + 4))
        assert torch.equal(y, x + 1)
        assert x.dtype == torch.int64
    with pytest.raises(IndexError):
        windows[count]
    if count:
        assert torch.equal(windows[-1][0], seen[-1][0])


def test_sources_come_by_name_modules_before_packages(tmp_path: Path):
    for name, text in {
        "b.py": "b\n",
        "a.py": "a\r\n",
        "pkg/__init__.py": "p\n",
        "pkg/test/__init__.py": "no\n",
        "site-packages/__init__.py": "no\n",
        "loose/c.py": "no\n",
        "notes.txt": "no\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    assert read_python_sources(directory=tmp_path) == "a\nb\np\n"
    assert read_python_sources(4, directory=tmp_path) == "a\nb"


@pytest.mark.parametrize("name", ["", "missing"])
def test_no_sources_is_an_error_that_says_where_it_looked(tmp_path: Path, name: str):
    with pytest.raises(DataError) as caught:
        read_python_sources(directory=tmp_path / name)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.fix


def test_standard_library_is_split_by_position():
    data = load_python_sources(32, max_bytes=20_000, test_fraction=0.25)
    text = read_python_sources(20_000)
    again = data.vocabulary.decode(torch.cat([data.train.tokens, data.test.tokens]))
    assert "\ufffd" not in again
    assert again == text
    assert len(data.test.tokens) == round(len(text) / 4)
    assert data.train[0][0].shape == (32,)


@pytest.mark.parametrize(("window", "fraction"), [(0, 0.1), (10_000, 0.1), (8, 1.0), (8, -1.0)])
def test_windows_that_cannot_be_are_refused(window: int, fraction: float):
    with pytest.raises(UsageError):
        load_python_sources(window, max_bytes=1000, test_fraction=fraction)
