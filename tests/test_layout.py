"""Layouts, against nested lists: numpy-like brute force over arrays of ranks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import MeshError
from dure.layout import Axis, Layout

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def array(shape):
    """All coordinates of an array, with the position of each in row-major order."""
    return {c: i for i, c in enumerate(itertools.product(*map(range, shape)))}


@st.composite
def chosen(draw):
    """A shape, and some of its axes in any order."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    return shape, order[: draw(st.integers(1, len(shape)))]


def walked(shape, axes):
    """Positions of the chosen axes, the others being 0; the last of them runs fastest."""
    cells = array(shape)
    found = []
    for digits in itertools.product(*(range(shape[axis]) for axis in axes)):
        coordinate = [0] * len(shape)
        for axis, digit in zip(axes, digits, strict=True):
            coordinate[axis] = digit
        found.append(cells[tuple(coordinate)])
    return found


@given(chosen())
def test_selected_axes_are_walked_in_their_order(case):
    shape, axes = case
    layout = Layout.row_major(shape).select(axes)
    assert layout.shape == tuple(shape[axis] for axis in axes)
    assert layout.positions() == walked(shape, axes) == layout.flatten().positions()
    assert layout.size == len(walked(shape, axes))


@given(chosen())
def test_copies_fill_the_array_and_every_position_knows_its_place(case):
    shape, axes = case
    layout, size = Layout.row_major(shape).select(axes), math.prod(shape)
    copies = layout.copies(size)
    assert sorted(itertools.chain(*copies)) == list(range(size))
    for copy in copies:
        steps = [position - copy[0] for position in copy]
        assert steps == walked(shape, axes)
    coordinates = {i: c for c, i in array(shape).items()}
    for copy in copies:
        for position in copy:
            assert layout.first(position) == copy[0]
            expected = tuple(coordinates[position][axis] for axis in axes)
            assert layout.coordinate(position) == expected


@given(chosen())
def test_a_flattened_axis_knows_its_places_and_splits_into_what_it_was_made_of(case):
    shape, axes = case
    layout = Layout.row_major(shape).select(axes)
    flat = Layout((layout.flatten(),))
    for index, position in enumerate(layout.positions()):
        assert flat.coordinate(position) == (index,)
    assert flat.split(0, layout.shape).positions() == layout.positions()
    assert flat.split(0, layout.shape) == layout


@given(shapes, st.data())
def test_an_axis_splits_into_any_factors_if_its_ranks_are_evenly_apart(shape, data):
    size = math.prod(shape)
    factors, left = [], size
    while left > 1:
        divisor = data.draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0]))
        factors.append(divisor)
        left //= divisor
    axis = Layout.row_major(shape).flatten()
    parts = axis.split(factors)
    assert Layout(parts) == Layout.row_major(factors)


@given(shapes, st.data())
def test_axes_of_two_layouts_join_if_they_share_none(shape, data):
    whole = Layout.row_major(shape)
    left = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    right = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True))
    shared = [axis for axis in left if axis in right and shape[axis] > 1]
    parts = [whole.select(left), whole.select(right)]
    if shared:
        with pytest.raises(MeshError):
            Layout.concatenate(parts)
    else:
        assert Layout.concatenate(parts) == whole.select(left + right)


def test_axes_with_the_same_positions_are_equal():
    assert Axis([(2, 4), (4, 1)]) == Axis([(8, 1)])
    assert hash(Axis([(2, 4), (1, 9), (4, 1)])) == hash(Axis([(8, 1)]))
    assert Axis([(2, 4), (2, 1)]) != Axis([(4, 1)])
    assert Axis([(2, 4), (2, 1)]).stride == (4, 1)
    assert Axis([(4, 2)]).stride == 2
    assert Axis([]).size == 1


def test_what_cannot_be_cut_is_refused():
    uneven = Axis([(2, 6), (3, 1)])  # positions 0 1 2 6 7 8
    assert uneven.split((2, 3)) == (Axis([(2, 6)]), Axis([(3, 1)]))
    with pytest.raises(MeshError):
        uneven.split((3, 2))
    with pytest.raises(MeshError):
        uneven.split((2, 2))
    with pytest.raises(MeshError):
        uneven.split((-2, -3))
    with pytest.raises(MeshError):
        Axis([(0, 1)])


def test_layouts_that_leave_holes_no_copy_fills_are_refused():
    with pytest.raises(MeshError):
        Layout((Axis([(4, 3)]), Axis([(2, 1)]))).complement(12)  # 0 3 6 9 and one further each
    with pytest.raises(MeshError):
        Layout((Axis([(4, 1)]),)).complement(10)
