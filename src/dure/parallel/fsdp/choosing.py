"""Which strategy a group of parameters gets: `fully_shard` chooses, a program may force one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from dure import env
from dure.errors import UsageError
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.extensions import Extended, is_extended
from dure.parallel.fsdp.gathered import Gathered
from dure.parallel.fsdp.hosts import SharedByHost, why_not_by_host
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.reducing import CustomCollective
from dure.parallel.fsdp.shared import Shared, why_not_shared
from dure.parallel.fsdp.strategy import Strategy
from dure.trace import logs

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["forced", "strategy", "strategy_for"]

NAMES = ("shared", "gathered")
_log = logs.logger("parallel")
_forced: ContextVar[str | None] = ContextVar("dure_fsdp_strategy", default=None)


@contextmanager
def strategy(name: str) -> Iterator[None]:
    """Have `fully_shard` use one strategy instead of its choice. So does DURE_FSDP_STRATEGY.

    Args:
        name: "shared" or "gathered".

    Raises:
        UsageError: No such strategy. `fully_shard` raises where "shared" cannot be.

    Example:
        ```python
        net = torch.nn.Linear(4, 2)
        with fsdp.strategy("gathered"):
            fsdp.fully_shard(net)
        ```
    """
    token = _forced.set(_checked(name))
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """Return the strategy that the program or the environment asks for."""
    name = _forced.get() or env.text("DURE_FSDP_STRATEGY")
    return _checked(name) if name else None


def _checked(name: str) -> str:
    if name not in NAMES:
        raise UsageError(
            "no such strategy", op="fsdp.strategy", seen=f"{name!r}; there are {', '.join(NAMES)}"
        )
    return name


def strategy_for(
    parameters: Sequence[FSDPParameter],
    axes: DataAxes,
    requested: str | None = None,
    post_forward_group: ProcessGroup | None = None,
    all_gather: CustomCollective | None = None,
) -> Strategy:
    """Return *shared* where it can be, else *gathered*; or the one that is asked for.

    Args:
        parameters: Of one group: of one dtype, all tensor subclasses with extensions or none.
        axes: Over which they are sharded.
        requested: "shared", "gathered", or None for the choice.
        post_forward_group, all_gather: Of *gathered*; see `Gathered`.

    Raises:
        UsageError: *shared* is asked for where it cannot be; why.
    """
    made = _choose(parameters, axes, requested, post_forward_group, all_gather)
    _report(made, parameters, axes)
    return made


class _Reported(set[tuple[str, str]]):
    """Strategies, and why they were chosen, that the log has of a group."""


@logs.never_fails
def _report(made: Strategy, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
    """Write one line: at INFO for the first parameters that get a strategy for a reason."""
    group = axes.shard_group
    known: _Reported = group.belongings.setdefault(_Reported, _Reported())
    first = (made.name, made.why) not in known
    known.add((made.name, made.why))
    rank = group.rank() if first else 1
    if logs.reports(_log, rank):
        nbytes = sum(p.unsharded_shape.numel() * p.dtype.itemsize for p in parameters)
        logs.decided(
            _log,
            rank,
            "fully_shard: %d parameters of %s over %d ranks are %s (%s)%s",
            *(len(parameters), logs.size_text(nbytes), axes.size, made.name, made.why),
            "; others of the same kind are listed at DEBUG" if first else "",
        )


def _choose(
    parameters: Sequence[FSDPParameter],
    axes: DataAxes,
    requested: str | None,
    post_forward_group: ProcessGroup | None,
    all_gather: CustomCollective | None,
) -> Strategy:
    reason = None
    if requested != "gathered" and all_gather is None:
        over_hosts = axes.shard_group.num_hosts > 1
        reason = why_not_shared(parameters, axes)
        if reason is None and over_hosts:
            reason = why_not_by_host(axes)
        if reason is None:
            return SharedByHost(parameters, axes) if over_hosts else Shared(parameters, axes)
        if requested == "shared":
            raise UsageError(
                "these parameters cannot be in memory that ranks share",
                op="fully_shard",
                seen=reason,
            )
    if is_extended(parameters[0].part):
        made = Extended(parameters, axes, all_gather)
    else:
        made = Gathered(parameters, axes, post_forward_group, all_gather)
    made.why = reason or made.why
    return made
