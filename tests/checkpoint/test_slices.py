"""Boxes of a tensor: whether some of them are the complete tensor."""

import pytest

from dure.checkpoint.slices import Box, fault_of_cover


def box(*ranges):
    return Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


LAST = box((2, 3), (2, 3))


@pytest.mark.parametrize(
    ("shape", "boxes", "fault"),
    [
        ((4, 2), [box((0, 2), (0, 2)), box((2, 4), (0, 2))], None),
        ((4, 2), [box((0, 4), (1, 2)), box((0, 4), (0, 1))], None),
        ((3, 3), [box((0, 1), (0, 2)), box((0, 2), (2, 3)), box((1, 3), (0, 2)), LAST], None),
        ((), [box()], None),
        ((0, 2), [], None),
        ((), [], "0 times"),
        ((4, 2), [box((0, 2), (0, 2))], "4 of 8 elements"),
        ((4, 2), [box((0, 2), (0, 2)), box((1, 3), (0, 2))], "overlap"),
        ((2, 2), [box((0, 2), (0, 2)), box((0, 1), (0, 1))], "overlap"),
        ((4,), [box((2, 6))], "outside"),
        ((4,), [box((-1, 3))], "is none"),
        ((4,), [box((0, 4)), box((2, 2))], "is none"),
        ((4,), [box((0, 2), (0, 2))], "number of dimensions"),
    ],
)  # fmt: skip
def test_whether_boxes_are_the_whole(shape, boxes, fault):
    found = fault_of_cover(shape, boxes)
    assert found is None if fault is None else fault in (found or "")
