"""Which tensors overlap in memory."""

import pytest
import torch

from dure.training.shared_parameters import clusters_of


def test_tensors_that_overlap_are_one_cluster():
    flat = torch.zeros(30)
    parts = [flat[0:10], flat[10:20], flat[5:12], torch.zeros(7), flat[20:30]]
    assert clusters_of(parts) == [(0, 1, 2), (3,), (4,)]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_tensors_without_elements_overlap_nothing(shape):
    tensors = [torch.empty(shape), torch.zeros(3), torch.empty(shape)]
    assert clusters_of(tensors) == [(0,), (1,), (2,)]
