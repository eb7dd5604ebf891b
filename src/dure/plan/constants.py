"""The constants of the cost model, and the terms that they are for.

They are read from `data/constants.toml`, where each has its unit, meaning and source.
`benchmarks/plan_accuracy.py --fit` fits them to published measurements. `data/terms.toml` has the
parts of a step's time and of a rank's memory, each in words and as a formula.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Constant", "Constants", "described", "document"]


class Constants:
    """Values, as attributes with the names in the file, which also explains them."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> float:
        raise AttributeError(name)

    @staticmethod
    @cache
    def load() -> Constants:
        """Return the fitted ones."""
        return Constants({name: constant.value for name, constant in described().items()})

    def replaced(self, measured: Mapping[str, float]) -> Constants:
        """Return them with some of another value."""
        return Constants(vars(self) | dict(measured))


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant with what is known of it."""

    value: float
    before: float  # the fit
    unit: str
    meaning: str
    source: str


@cache
def described() -> dict[str, Constant]:
    """Return all constants with unit, meaning and source."""
    return {name: Constant(**table) for name, table in document("constants")["constant"].items()}


@cache
def document(name: str) -> dict[str, Any]:
    """Return a data file: "constants" with the fit that they come from, "terms", or another."""
    return tomllib.loads((files("dure.plan") / "data" / f"{name}.toml").read_text())
