"""The images that scikit-learn brings."""

import pytest

from dure.data import digits
from dure.data.images import load_digits
from dure.errors import DataError


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
