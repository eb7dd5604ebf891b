"""1F1B and its kin: after a warm-up, each rank does one forward, one backward, and so on.

A rank goes forward only so far ahead that the first backward reaches it without a pause; from then
on each backward frees what the next forward needs. So it holds the activations of p - rank
microbatches, and not of all.

*Interleaved*: with v stages a rank (in loop order), microbatches pass in rounds of about p: a round
goes through all local stages before the next one starts. The pipeline fills and drains in steps of
a v-th of a rank's work, so its bubble is a v-th.

*Zero bubble*: the backward is split. Gradients of inputs, which another rank awaits, are computed
at once (I), gradients of weights (W) so much later that they fill what would be idle at the end.
Rank r keeps r of them back; the warm-up is shorter, since an I takes half of a backward's time.

Sources: PipeDream-flush and interleaved 1F1B, https://arxiv.org/abs/2104.04473; ZB1P,
https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from dure.errors import UsageError
from dure.schedules.actions import Action, Kind, Schedule

__all__ = ["interleaved_1f1b", "interleaved_zero_bubble", "one_f_one_b"]


def one_f_one_b(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return 1F1B with one stage a rank; fewer microbatches than ranks are allowed.

    Args:
        placement: For each stage its rank.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Example:
        ```python
        from dure import schedules

        last = schedules.one_f_one_b((0, 1), microbatches=2).ranks[1]
        assert [str(action) for action in last if action] == ["1F0", "1B0", "1F1", "1B1"]
        ```
    """
    p = len(placement)
    ranks = tuple(
        _alternate(*_orders((stage,), microbatches, microbatches), p - 1 - stage)
        for stage in map(placement.index, range(p))
    )
    return Schedule(ranks, placement, microbatches, "1f1b")


def interleaved_1f1b(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return interleaved 1F1B; stages are placed in loop order.

    Args:
        placement: For each stage its rank, in loop order.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Raises:
        UsageError: The microbatches do not go into rounds of equal size.

    Example:
        ```python
        schedule = schedules.interleaved_1f1b(schedules.loop_placement(4, 2), microbatches=4)
        assert schedules.validate(schedule)
        ```
    """
    return _interleaved("interleaved-1f1b", placement, microbatches)


def interleaved_zero_bubble(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Return interleaved 1F1B with split backwards; stages are placed in loop order.

    Args:
        placement: For each stage its rank, in loop order.
        microbatches: How many microbatches.

    Returns:
        A grid.

    Raises:
        UsageError: The microbatches do not go into rounds of equal size.

    Example:
        ```python
        schedule = schedules.interleaved_zero_bubble(schedules.loop_placement(4, 2), microbatches=4)
        assert schedules.validate(schedule)
        ```
    """
    return _interleaved("interleaved-zero-bubble", placement, microbatches)


def _interleaved(name: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    p = max(placement) + 1
    rounds = max(1, microbatches // p)
    size, rest = divmod(microbatches, rounds)
    if rest:
        raise UsageError(
            f"{name} passes microbatches in rounds of equal size, at least one for each rank",
            seen=f"{microbatches} microbatches on {p} ranks, in {rounds} rounds",
            fix=f"Take {microbatches - rest} or {microbatches - rest + rounds} microbatches.",
        )
    ranks: list[tuple[Action, ...]] = []
    for rank in range(p):
        local = tuple(range(rank, len(placement), p))
        orders = _orders(local, microbatches, size)
        ahead = (len(local) - 1) * size
        if name == "interleaved-1f1b":
            ranks.append(_alternate(*orders, ahead + 2 * (p - 1 - rank)))
        else:
            ranks.append(_alternate(*orders, ahead + p - 1 - rank, delay=rank))
    return Schedule(tuple(ranks), placement, microbatches, name)


_Order = list[tuple[int, int]]  # (stage, microbatch)


def _orders(local: tuple[int, ...], microbatches: int, size: int) -> tuple[_Order, _Order]:
    """Return the orders of forwards and of backwards of a rank, in rounds of `size`."""
    firsts = range(0, microbatches, size)
    forwards = [(s, m) for first in firsts for s in local for m in range(first, first + size)]
    back = local[::-1]
    return forwards, [(s, m) for first in firsts for s in back for m in range(first, first + size)]


def _alternate(
    forwards: _Order, backwards: _Order, warmup: int, delay: int | None = None
) -> tuple[Action, ...]:
    """Go `warmup` steps forward, then alternate, then go back.

    With `delay`, backwards are in two halves, the second so many steps behind the first.
    """
    back = Kind.FULL_BACKWARD if delay is None else Kind.BACKWARD_INPUT
    actions = [Action(s, Kind.FORWARD, m) for s, m in forwards[:warmup]]
    due: _Order = []
    for i, (stage, microbatch) in enumerate(backwards):
        actions += [Action(s, Kind.FORWARD, m) for s, m in forwards[warmup + i : warmup + i + 1]]
        actions.append(Action(stage, back, microbatch))
        due.append((stage, microbatch))
        if delay is not None and i >= delay:
            actions.append(_weight(*due.pop(0)))
    return (*actions, *(_weight(*late) for late in due if delay is not None))


def _weight(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.BACKWARD_WEIGHT, microbatch)
