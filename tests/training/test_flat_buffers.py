"""Flat tensors out of blocks of memory, and tensors packed into one."""

from __future__ import annotations

import torch

from dure.training.flat_buffers import FlatBuffers, by_kind, dense_strides, packed, padded, unpack

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


def test_after_a_restart_the_same_memory_is_taken_in_another_order():
    memory = FlatBuffers({FLOATS: 32}, _zeros)
    before = memory.take(FLOATS, 16).fill_(7)
    memory.restart()
    after = memory.take(FLOATS, 20)
    assert after.data_ptr() == before.data_ptr()
    assert after.tolist() == [7] * 16 + [0] * 4


def test_padding_is_a_whole_number_of_cache_lines():
    assert [padded(n, torch.float32) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert padded(1, torch.complex128) == 4


def test_tensors_are_packed_in_their_order_and_unpacked_to_where_they_are():
    a, b = torch.arange(6.0).view(2, 3).t(), torch.nn.Parameter(torch.tensor([9.0]))
    flat = packed([a, b])
    assert flat.tolist() == [0, 3, 1, 4, 2, 5, 9]
    unpack(flat + 10, [a, b])
    assert a.tolist() == [[10, 13], [11, 14], [12, 15]]
    assert b.tolist() == [19]
    assert b.grad_fn is None


def test_tensors_of_one_kind_keep_their_order():
    a, b, c = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(2)
    kinds = by_kind([a, b, c])
    assert list(kinds) == [FLOATS, (torch.int64, CPU)]
    assert kinds[FLOATS][0] is a
    assert kinds[FLOATS][1] is c


def test_strides_stay_where_nothing_is_between_the_elements():
    dense = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert dense_strides(dense) == (12, 1, 6, 3)
    assert dense_strides(torch.empty(4, 6)[:, ::2]) == (3, 1)
    assert dense_strides(torch.empty(1, 3).expand(2, 3)) == (3, 1)
