"""Which strategy a group of parameters gets."""

from __future__ import annotations

from collections.abc import Sequence

from dure.errors import UsageError
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.gathered import Gathered
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.shared import Shared, why_not_shared
from dure.parallel.fsdp.strategy import Strategy, forced

__all__ = ["strategy_for"]


def strategy_for(parameters: Sequence[FSDPParameter], axes: DataAxes) -> Strategy:
    """Return *shared* where it can be, else *gathered*; or the one that is asked for.

    Raises:
        UsageError: *shared* is asked for where it cannot be; why.
    """
    asked = forced()
    if asked == "gathered":
        return Gathered(parameters, axes)
    reason = why_not_shared(parameters, axes)
    if reason is None:
        return Shared(parameters, axes)
    if asked == "shared":
        raise UsageError(
            "these parameters cannot be in memory that ranks share", op="fully_shard", seen=reason
        )
    return Gathered(parameters, axes)
