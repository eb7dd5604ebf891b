"""The law that a figure follows as the number of ranks grows, fitted simply.

A figure is compared with `a + b f(ranks)` for each f of `LAWS`, with a and b not negative. The
first law that is nowhere further off than `NEAR` is reported, else the one that is nearest. Two
measurements cannot tell laws with two coefficients apart, so a is 0 then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

LAWS: dict[str, Callable[[float], float]] = {
    "constant": lambda n: 0.0,
    "log n": math.log2,
    "n": lambda n: n,
    "n²": lambda n: n * n,
}
NEAR = 0.15
"""How far off a law may be, as a share of the figure."""


def law_of(figures: Mapping[int, float]) -> str:
    """Return the name of the law that figures by numbers of ranks follow; "" if there is one only.

    Example:
        >>> law_of({16: 5.0, 256: 5.1, 1024: 4.9})
        'constant'
        >>> law_of({16: 116.0, 256: 356.0, 1024: 1124.0})
        'n'
    """
    if len(figures) < 2:
        return ""
    misses = {name: _miss(figures, function) for name, function in LAWS.items()}
    near = [name for name, miss in misses.items() if miss <= NEAR]
    return near[0] if near else min(misses, key=lambda name: misses[name])


def _miss(figures: Mapping[int, float], function: Callable[[float], float]) -> float:
    """Return how far off the best coefficients are at the worst number of ranks, as a share."""
    points = [(function(n), value) for n, value in figures.items()]
    if all(x == 0.0 for x, _ in points):
        coefficients = [(_middle([value for _, value in points]), 0.0)]
    else:
        coefficients = [(0.0, _middle([value / x for x, value in points if x]))]
        if len(points) > 2:
            coefficients.append(_line(points))
    return min(
        max(abs(a + b * x - value) / max(abs(value), 1e-12) for x, value in points)
        for a, b in coefficients
    )


def _middle(values: list[float]) -> float:
    return (min(values) + max(values)) / 2


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return a and b with the least squares of relative errors; neither is below 0."""
    weights = [1 / max(abs(value), 1e-12) ** 2 for _, value in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = max(0.0, joint / spread)
    return max(0.0, mean_y - slope * mean_x), slope
