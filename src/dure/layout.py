"""Layouts of an array of ranks, as sizes and strides.

A mesh's ranks are an array. Slicing, flattening, splitting and joining axes of a mesh is arithmetic
on sizes and strides, without ranks or groups:

- A *position* is an index into the flat array of the root mesh's ranks.
- An *axis* has `size` positions, relative to its first. It is a list of (size, stride) digits, of
  which the last varies fastest: position = sum of digit * stride. An axis of an array has one
  digit; an axis made by flattening axes that are not adjacent has one digit per axis.
- A *layout* is a tuple of axes. Axis 0 varies slowest, as in a tensor in row-major order.

Axes are normalized: digits of size 1 are dropped, and adjacent digits that are equivalent to a
single one are joined. So axes with the same positions in the same order are equal.

Source: the layouts of CuTe (https://docs.nvidia.com/cutlass/media/docs/cpp/cute/02_layout_algebra.html),
restricted to what cutting an array of ranks needs.

Internal: names here may change in any release.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dure.errors import MeshError

__all__ = ["Axis", "Layout"]


@dataclass(frozen=True, slots=True)
class Axis:
    """The positions along one axis, relative to its first.

    Args:
        digits: (size, stride) pairs, the last varying fastest; they are normalized.
    """

    digits: tuple[tuple[int, int], ...]

    def __init__(self, digits: Iterable[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for size, stride in digits:
            if size < 1 or stride < 1:
                raise MeshError(
                    "sizes and strides of an axis must be at least 1",
                    seen=f"size {size}, stride {stride}",
                )
            if size == 1:
                continue
            if joined and joined[-1][1] == size * stride:
                joined[-1] = (joined[-1][0] * size, stride)
            else:
                joined.append((size, stride))
        object.__setattr__(self, "digits", tuple(joined))

    @property
    def size(self) -> int:
        """Number of positions."""
        return math.prod(size for size, _ in self.digits)

    @property
    def stride(self) -> int | tuple[int, ...]:
        """Distance of adjacent positions; one for each digit if there are several."""
        strides = tuple(stride for _, stride in self.digits) or (1,)
        return strides[0] if len(strides) == 1 else strides

    def positions(self) -> list[int]:
        """Return the positions in order; the first is 0."""
        ranges = [range(0, size * stride, stride) for size, stride in self.digits]
        return [sum(parts) for parts in itertools.product(*ranges)]

    def index(self, position: int) -> int:
        """Return the index of a position along this axis."""
        index = 0
        for size, stride in self.digits:
            index = index * size + position // stride % size
        return index

    def split(self, sizes: Sequence[int]) -> tuple[Axis, ...]:
        """Split the axis into several, of which the last varies fastest.

        Raises:
            MeshError: The product of the sizes is not the size of the axis, or they split a digit:
                an axis with digits of sizes 2 and 3 can be split into 2 and 3, but not 3 and 2.
        """
        if any(size < 1 for size in sizes) or math.prod(sizes) != self.size:
            raise MeshError(
                "the sizes of the parts must multiply to the size of the axis",
                seen=f"{tuple(sizes)} for an axis of {self.size}",
            )
        digits = list(self.digits)
        parts: list[Axis] = []
        for wanted in reversed(sizes):
            taken: list[tuple[int, int]] = []
            left = wanted
            while left > 1:
                size, stride = digits.pop()
                part = math.gcd(left, size)
                if part < min(left, size):
                    raise MeshError(
                        "the axis cannot be split into these sizes: its strides are not uniform",
                        seen=f"{tuple(sizes)} for an axis of {self.size} with strides "
                        f"{self.stride}",
                    )
                taken.insert(0, (part, stride))
                if part < size:
                    digits.append((size // part, stride * part))
                left //= part
            parts.insert(0, Axis(taken))
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tuple of axes over the positions of one array (see the module's docstring)."""

    axes: tuple[Axis, ...]

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> Layout:
        """Return the layout of a row-major array of this shape."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return cls(tuple(Axis([pair]) for pair in zip(shape, strides, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of positions."""
        return math.prod(self.shape)

    @property
    def stride(self) -> tuple[int | tuple[int, ...], ...]:
        """Stride of each axis; see `Axis.stride`."""
        return tuple(axis.stride for axis in self.axes)

    def positions(self) -> list[int]:
        """Return all positions, the last axis varying fastest."""
        return self.flatten().positions()

    def select(self, axes: Sequence[int]) -> Layout:
        """Return the layout of some of the axes, in this order."""
        return Layout(tuple(self.axes[axis] for axis in axes))

    def flatten(self) -> Axis:
        """Join all axes into one with the same positions in the same order."""
        return Axis(itertools.chain.from_iterable(axis.digits for axis in self.axes))

    def split(self, axis: int, sizes: Sequence[int]) -> Layout:
        """Replace an axis by several; see `Axis.split`."""
        return Layout((*self.axes[:axis], *self.axes[axis].split(sizes), *self.axes[axis + 1 :]))

    @staticmethod
    def concatenate(layouts: Iterable[Layout]) -> Layout:
        """Concatenate the axes of several layouts.

        Raises:
            MeshError: The result is not nested: axes overlap or interleave.
        """
        joined = Layout(tuple(axis for layout in layouts for axis in layout.axes))
        if not joined.is_nested():
            raise MeshError(
                "the axes overlap", seen=f"sizes {joined.shape}, strides {joined.stride}"
            )
        return joined

    def is_nested(self) -> bool:
        """Return whether each stride is a multiple of the extent of the digits below it.

        Then positions are distinct, and shifted copies of the layout fill an array. Every layout
        that is made from a row-major one is nested.
        """
        filled = 1
        for size, stride in sorted(self.flatten().digits, key=lambda digit: digit[1]):
            if stride % filled:
                return False
            filled = size * stride
        return True

    def complement(self, size: int) -> Axis:
        """Return the first positions of the copies of the layout that fill `size` positions.

        Raises:
            MeshError: The layout is not nested, or copies of it cannot fill `size` positions.
        """
        digits: list[tuple[int, int]] = []
        filled = 1
        for extent, stride in sorted(self.flatten().digits, key=lambda digit: digit[1]):
            digits.insert(0, (max(stride // filled, 1), filled))
            filled = extent * stride
        if size % filled or not self.is_nested():
            raise MeshError(
                "copies of this layout cannot fill the array",
                seen=f"sizes {self.shape}, strides {self.stride}, {size} positions",
            )
        digits.insert(0, (size // filled, filled))
        return Axis(digits)

    def copies(self, size: int) -> list[list[int]]:
        """Return the positions of each copy of the layout in an array of `size`."""
        own, firsts = self.positions(), self.complement(size).positions()
        return [[first + position for position in own] for first in firsts]

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Return the coordinate of a position within its copy of the layout."""
        return tuple(axis.index(position) for axis in self.axes)

    def first(self, position: int) -> int:
        """Return the first position of the copy of the layout that has `position`."""
        return position - sum(
            position // stride % size * stride for size, stride in self.flatten().digits
        )
