"""Images with their labels, from files."""

import torch

from dure.data.images import load_idx
from tests.data.idx_files import write_data_set


def test_load_idx_gives_images_from_zero_to_one(tmp_path):
    arrays = write_data_set(tmp_path)
    data = load_idx(tmp_path)
    assert data.train.pixels.shape == (12, 1, 5, 4)
    assert data.num_classes == 4
    pixels, label = data.train[7]
    assert label == arrays["train-labels"][7]
    assert torch.equal(pixels[0], torch.tensor(arrays["train-images"][7]) / 255)
