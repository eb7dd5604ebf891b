"""The constants of the cost model.

They are read from `data/constants.toml`, where each has its unit, meaning and source.
`benchmarks/plan_accuracy.py --fit` fits them to published measurements.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Constant", "Constants", "described"]


class Constants:
    """Values, as attributes of the names that the file has; what each means is there too."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> float:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    @staticmethod
    @cache
    def load() -> Constants:
        """Return the fitted ones."""
        return Constants({name: constant.value for name, constant in described().items()})

    @staticmethod
    def before() -> Constants:
        """Return what the fit starts from."""
        return Constants({name: constant.before for name, constant in described().items()})

    def replaced(self, measured: Mapping[str, float]) -> Constants:
        """Return them with some of another value."""
        return Constants(self._values | dict(measured))

    @staticmethod
    def names() -> list[str]:
        """Return all names, in order."""
        return list(described())


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
    return {name: Constant(**table) for name, table in document()["constant"].items()}


@cache
def document() -> dict[str, Any]:
    """Return the file: constants, and the fit that they come from."""
    return tomllib.loads((files("dure.plan") / "data" / "constants.toml").read_text())
