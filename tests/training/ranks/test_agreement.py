"""One rank's values for all: what is sent, and where it comes to lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dure
from dure.testing import CommRecorder, run_ranks
from dure.training.agreement import broadcast_tensors, gather_texts, verify_equal

LARGE = 64 * 1024 // 4 + 1
"""Elements of the smallest float32 tensor that travels by itself."""


def test_large_tensors_travel_alone_and_small_ones_together_3_ranks() -> None:
    def rank_main(rank: int) -> tuple[list[torch.Tensor], dict[str, int], int]:
        def filled(tensor: torch.Tensor, value: int) -> torch.Tensor:
            return tensor.fill_(10 * rank + value)

        tensors = [
            filled(torch.empty(LARGE - 1), 0),
            filled(torch.empty(3, 2).t(), 1),
            filled(torch.empty(LARGE), 2),
            torch.nn.Parameter(filled(torch.empty(()), 3)),
            filled(torch.empty(2, dtype=torch.int64), 4),
            filled(torch.empty(0), 5),
            filled(torch.empty(2, LARGE).t(), 6),
        ]
        with CommRecorder(rank=rank) as seen:
            broadcast_tensors(dure._get_default_group(), tensors, root=2)
        return tensors, dict(seen.counts), seen.nbytes()

    for tensors, counts, num_bytes in run_ranks(3, rank_main):
        for value, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full_like(tensor, 20 + value))
        assert counts == {"broadcast": 4}  # two large ones, the small floats, the integers
        assert num_bytes == 4 * (LARGE - 1 + 6 + LARGE + 1 + 2 * LARGE) + 8 * 2


class GatheredError(Exception):
    """The device of what was to be gathered."""


def test_texts_are_compared_on_the_device_of_the_group() -> None:
    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        raise GatheredError(*{str(t.device) for t in (*outputs, tensor)})

    group: Any = SimpleNamespace(
        size=lambda: 2, message_device=torch.device("meta"), all_gather=all_gather
    )
    for call in (lambda: verify_equal(group, ["a"]), lambda: gather_texts(group, b"a")):
        with pytest.raises(GatheredError, match="meta"):
            call()
