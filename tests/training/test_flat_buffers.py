"""Flat tensors out of blocks of memory, and tensors packed into one."""

from __future__ import annotations

import torch

from dure.training.flat_buffers import FlatBuffers, dense_strides

CPU = torch.device("cpu")
FLOATS, HALVES = (torch.float32, CPU), (torch.bfloat16, CPU)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def test_what_is_taken_begins_64_bytes_apart_and_in_the_block_of_its_kind():
    memory = FlatBuffers({FLOATS: 64, HALVES: 64}, _zeros)
    first, second, third = (memory.take(FLOATS, n) for n in (3, 17, 1))
    half = memory.take(HALVES, 5)
    starts = [t.data_ptr() - first.data_ptr() for t in (first, second, third)]
    assert starts == [0, 64, 192]  # 3 floats are padded to 16, 17 to 32
    assert [t.numel() for t in (first, second, third, half)] == [3, 17, 1, 5]
    assert half.dtype == torch.bfloat16
    assert half.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_strides_stay_where_nothing_is_between_the_elements():
    dense = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert dense_strides(dense) == (12, 1, 6, 3)
    assert dense_strides(torch.empty(4, 6)[:, ::2]) == (3, 1)
    assert dense_strides(torch.empty(1, 3).expand(2, 3)) == (3, 1)
