"""Images with their labels: from files, and those that scikit-learn brings."""

import pytest
import torch

from dure.data import digits
from dure.data.images import load_digits, load_idx
from dure.errors import DataError
from tests.data.idx_files import write_data_set


def test_load_idx_gives_images_from_zero_to_one(tmp_path):
    arrays = write_data_set(tmp_path)
    data = load_idx(tmp_path)
    assert data.train.pixels.shape == (12, 1, 5, 4)
    assert data.num_classes == 4
    pixels, label = data.train[7]
    assert label == arrays["train-labels"][7]
    assert torch.equal(pixels[0], torch.tensor(arrays["train-images"][7]) / 255)


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
