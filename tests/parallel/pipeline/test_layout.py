"""What travels between stages, taken apart and put together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dure.errors import UsageError
from dure.parallel.pipeline.layout import pack, unpack


@dataclass
class Unknown:
    """Of a class that torch's pytrees do not know."""

    x: torch.Tensor


def test_an_object_whose_gradients_would_be_lost_is_refused():
    with pytest.raises(UsageError, match="Unknown"):
        pack((Unknown(torch.ones(1, requires_grad=True)),))


def test_an_object_without_gradients_travels():
    (found,) = unpack(pack((Unknown(torch.ones(1)),)))
    assert found.x.tolist() == [1.0]
