"""The constants of the cost model.

They are read from `data/constants.toml`, where each has its unit, meaning and source.
`benchmarks/plan_accuracy.py --fit` fits them to published measurements.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Constant", "Constants", "described"]


@dataclass(frozen=True, slots=True)
class Constants:
    """Values, by name; what each means is in the file."""

    gemm_a100: float
    gemm_h100: float
    gemm_area: float
    fp8_casts: float
    power: float
    flash_a100: float
    flash_h100: float
    flash_newest: float
    scores_passes: float
    passes: float
    compiled: float
    loss_passes: float
    recompute: float
    host: float
    host_h100: float
    host_backward: float
    host_ends: float
    host_sharded: float
    host_compiled: float
    link: float
    link_latency: float
    net: float
    net_latency: float
    efa_latency: float
    net_growth: float
    efa_tp: float
    overlapped: float
    message: float
    message_blocking: float
    message_bytes: float
    overlap: float
    overlap_sharded: float
    interference: float
    adam: float
    kept: float
    gathered: float
    scores_kept: float
    context: float
    room: float
    refill: float

    @staticmethod
    @cache
    def load() -> Constants:
        """Return the fitted ones."""
        return Constants(**{name: constant.value for name, constant in described().items()})

    @staticmethod
    def before() -> Constants:
        """Return what the fit starts from."""
        return Constants(**{name: constant.before for name, constant in described().items()})

    def replaced(self, measured: dict[str, float]) -> Constants:
        """Return them with some measured on a machine."""
        return replace(self, **measured)

    @staticmethod
    def names() -> list[str]:
        """Return all names, in order."""
        return [field.name for field in fields(Constants)]


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
