"""A mesh as text: its ranks in the grid, the axes named along the edges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["draw"]


def draw(ranks: Sequence[int], shape: tuple[int, ...], names: Sequence[str], mine: int) -> str:
    """Draw the ranks of a mesh, the last axis to the right, the one before downwards.

    Args:
        ranks: The ranks, the last axis running fastest.
        shape: Size of each axis.
        names: Name of each axis.
        mine: The rank to mark with a star; -1 for none.

    Returns:
        One grid for each coordinate on the axes before the last two, as in::

                    tp 0  tp 1
            dp 0       0     1*
            dp 1       2     3
    """
    rows = shape[-2] if len(shape) > 1 else 1
    columns = shape[-1] if shape else 1
    across = [f"{names[-1]} {column}" if shape else "" for column in range(columns)]
    down = [f"{names[-2]} {row}" if len(shape) > 1 else "" for row in range(rows)]
    cells = [f"{rank}*" if rank == mine else f"{rank} " for rank in ranks]
    width = max(map(len, [*across, *cells]))
    left = max(map(len, down))
    lines: list[str] = []
    blocks = itertools.product(*(range(size) for size in shape[:-2]))
    for number, block in enumerate(blocks):
        if block:
            named = zip(names, block, strict=False)
            lines.append(", ".join(f"{name} {index}" for name, index in named))
        lines.append(" " * left + "".join(f"  {text:>{width}}" for text in across))
        for row in range(rows):
            begin = (number * rows + row) * columns
            line = "".join(f"  {text:>{width}}" for text in cells[begin : begin + columns])
            lines.append(f"{down[row]:<{left}}{line}".rstrip())
    return "\n".join(lines)
