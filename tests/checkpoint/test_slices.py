"""Boxes of a tensor: whether some of them are the complete tensor."""

import random
from collections import Counter

import numpy as np
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


def _split(drawn, cut):
    """Cut a box in two, in a dimension and at a place that are drawn."""
    dim = drawn.randrange(len(cut.sizes))
    if cut.sizes[dim] < 2:
        return [cut]
    at = drawn.randrange(1, cut.sizes[dim])
    ranges = list(zip(cut.offsets, cut.ends, strict=True))
    begin, end = ranges[dim]
    halves = (begin, begin + at), (begin + at, end)
    return [box(*ranges[:dim], half, *ranges[dim + 1 :]) for half in halves]


def _painted(shape, boxes):
    """Return what is wrong with boxes, by counting how often each element is in one."""
    counts = np.zeros(shape, int)
    for one in boxes:
        if any(end > size for end, size in zip(one.ends, shape, strict=True)):
            return "outside"
        counts[tuple(slice(a, b) for a, b in zip(one.offsets, one.ends, strict=True))] += 1
    return "overlap" if (counts > 1).any() else "in no slice" if (counts < 1).any() else None


def test_irregular_boxes_are_the_whole_if_each_element_is_in_one():
    drawn, seen = random.Random(3), Counter()
    for _ in range(2000):
        shape = tuple(drawn.randrange(1, 6) for _ in range(drawn.randrange(1, 4)))
        boxes = [box(*((0, size) for size in shape))]
        for _ in range(drawn.randrange(6)):
            boxes += _split(drawn, boxes.pop(drawn.randrange(len(boxes))))
        if drawn.random() < 0.3:
            boxes.pop(drawn.randrange(len(boxes)))
        if boxes and drawn.random() < 0.3:
            moved = boxes.pop(drawn.randrange(len(boxes)))
            offsets = list(moved.offsets)
            offsets[drawn.randrange(len(shape))] += 1
            boxes.append(Box(tuple(offsets), moved.sizes))
        wanted, found = _painted(shape, boxes), fault_of_cover(shape, boxes)
        assert found is None if wanted is None else wanted in (found or ""), (shape, boxes, found)
        seen[wanted] += 1
    assert min(seen.values()) > 50 and len(seen) == 4
