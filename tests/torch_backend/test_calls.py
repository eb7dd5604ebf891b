"""Arguments of torch's process groups become those of Dure's."""

import pytest
import torch.distributed as td

from dure.errors import TorchVersionError
from dure.torch_backend.calls import reduction_of


class SumWithoutFactor:
    """A premultiplied sum of a torch that does not show its factor, as 2.11."""

    def __eq__(self, other: object) -> bool:
        return other == td.ReduceOp.PREMUL_SUM

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def test_premultiplied_sums_need_a_torch_that_shows_their_factor():
    with pytest.raises(TorchVersionError, match=r"no factor of torch\.distributed\.ReduceOp"):
        reduction_of(SumWithoutFactor())
