"""Tensors whose elements are stored in one order, and copies of those that are not."""

from __future__ import annotations

import torch

from dure.tensor.strides import stored_like, with_equal_strides, write_back

ROWS = torch.arange(6.0).reshape(2, 3)


def test_a_tensor_is_stored_like_one_with_gaps_in_rows() -> None:
    gaps = torch.zeros(2, 6)[:, ::2]
    assert stored_like(ROWS, gaps) is ROWS
    columns = ROWS.t().contiguous().t()
    made = stored_like(columns, gaps)
    assert made.stride() == (3, 1)
    assert torch.equal(made, ROWS)
    assert stored_like(columns, torch.zeros(3, 2).t()) is columns
    assert stored_like(ROWS, torch.zeros(1, 3).expand(2, 3)) is ROWS


def test_strides_of_dimensions_with_one_element_do_not_matter() -> None:
    column = torch.zeros(4, 1).as_strided((4, 1), (1, 7))
    assert stored_like(column, torch.zeros(4, 1)) is column


def test_lists_that_are_stored_alike_are_not_copied() -> None:
    columns = ROWS.t().contiguous().t()
    _, copies = with_equal_strides([[ROWS, columns], [ROWS + 1, columns + 1], [None, None], []])
    assert not copies


def test_what_is_written_to_copies_reaches_the_tensors() -> None:
    gaps, columns, count = torch.zeros(2, 6)[:, ::2], ROWS.t().contiguous().t(), torch.zeros(())
    lists, copies = with_equal_strides([[gaps], [columns], [count]])
    assert [one.stride() for (one,) in lists] == [(3, 1), (3, 1), ()]
    lists[0][0].fill_(7.0)
    write_back(copies)
    assert torch.equal(gaps, torch.full((2, 3), 7.0))
    assert torch.equal(columns, ROWS)
    assert lists[2][0] is count
