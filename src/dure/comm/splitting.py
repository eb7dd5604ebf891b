"""Communicators of new groups are split off that of the group they were made from, over NCCL.

Without a split the ranks of each new group find each other and connect at its first operation,
which takes longer the more ranks there are. A split (`ncclCommSplit`) uses the connections of the
*parent*: the default group, or the group that `split_group` divides. All ranks of the parent call
it; each passes a *color*, and the ranks of one color get a communicator. Ranks of no new group pass
none. Groups that share no rank are made by one split: a *round*.

A split blocks the host until all ranks of the parent have called. It has no limit, and an abort
does not end it. So it is called only if nothing keeps a rank from it:

* Every rank of the parent was bound to a device (`device_id`) when the parent was made. All ranks
  know that from then (`BackendOptions.all_bound`). As in torch, a program asks for splits so.
* After their groups were made, all ranks of the parent meet in the store. Each says which groups it
  makes, and that nothing has failed. There is one verdict for all of them. If it is not to split,
  each group makes its communicator as without a device.
* Then a barrier of the parent ends its operations, as NCCL demands. Its limit is the parent's
  timeout. The default group's communicator was made when it was (`connect`).

If a rank ends between the barrier and the split, which follow each other at once, the others wait.

Cost:
    Four requests to the store, a barrier, and a split for each round. Rank 0 has one more request,
    which removes the keys of the split before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from dure.comm.backends.registry import parse_backend
from dure.comm.call import Call
from dure.comm.group import GroupSpec, ProcessGroup
from dure.errors import DureError
from dure.store.gathering import wait_for_verdicts
from dure.trace import logs

if TYPE_CHECKING:
    from dure.comm.backends.engine.group import EngineGroup

__all__ = ["connect", "rounds_of", "splitting"]

_log = logs.logger("comm")
_SPLIT, _APART = b"split", b"apart"
_LOOK_S = 0.5
"""How often a rank that waits for the others looks whether the parent is sound."""
Split = Callable[[Sequence[ProcessGroup | None]], None]
"""Splits communicators off for the groups that were made; None for those of other ranks."""


def rounds_of(rank_lists: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the groups that are made by one split each, by their places in `rank_lists`."""
    rounds: list[tuple[set[int], list[int]]] = []
    for place, ranks in enumerate(rank_lists):
        for used, places in rounds:
            if used.isdisjoint(ranks):
                used.update(ranks)
                places.append(place)
                break
        else:
            rounds.append((set(ranks), [place]))
    return [places for _, places in rounds]


def connect(group: ProcessGroup) -> None:
    """Make the communicator of all ranks now, if every rank is bound to a device, as torch does.

    So a program's first operation may be a batch of messages of some ranks only, which uses it.

    Args:
        group: The default group, which was made just now. All ranks call.

    Raises:
        CommError: As a barrier.
    """
    for engine in group.backends_with("splits"):
        _join_all(engine, "init_process_group")


def _join_all(engine: EngineGroup, op: str) -> None:
    with engine.held():
        engine.run(Call(op="barrier"), False)
        engine.check(op)


@contextmanager
def splitting(
    parent: ProcessGroup, specs: Sequence[GroupSpec], limit: timedelta
) -> Iterator[Split]:
    """Yield what splits communicators off the parent's, once the groups have been made.

    Args:
        parent: All its ranks call.
        specs: Of all groups that are made, also of those that this rank is not in; names are not
            used. Empty: there is no split.
        limit: How long to wait for the other ranks of the parent.

    Raises:
        CommError: As any operation of the parent.
    """
    engine: EngineGroup | None = next(iter(parent.backends_with("splits")), None)
    if engine is None or not any(_takes_part(spec, engine) for spec in specs):
        yield lambda groups: None
        return
    work = _Splitting(parent, engine, specs, limit)
    try:
        yield work.run
    except BaseException as error:
        work.meeting.give_up(error)
        raise


def _takes_part(spec: GroupSpec, engine: EngineGroup) -> bool:
    return len(spec.global_ranks) > 1 and engine.name in parse_backend(spec.backend).values()


def _verdict_of(entries: Sequence[bytes]) -> bytes:
    """Return whether all ranks split, for all of them."""
    return _SPLIT if len({*entries}) == 1 and entries[0] != _APART else _APART


class _Splitting:
    """One rank's part of the splits for one call of the program."""

    def __init__(
        self,
        parent: ProcessGroup,
        engine: EngineGroup,
        specs: Sequence[GroupSpec],
        limit: timedelta,
    ) -> None:
        self._parent, self._engine, self._specs, self._limit = parent, engine, specs, limit
        self.meeting = engine.next_split(_verdict_of)

    def run(self, groups: Sequence[ProcessGroup | None]) -> None:
        """Split off the communicators of `groups`; one for each spec, None if not of this rank."""
        if not self._is_agreed():
            return
        engine = self._engine
        splits = [_takes_part(spec, engine) for spec in self._specs]
        parts = [group for group, does in zip(groups, splits, strict=True) if does]
        ranks = [s.global_ranks for s, does in zip(self._specs, splits, strict=True) if does]
        with engine.held():
            _join_all(engine, "new_group")
            for places in rounds_of(ranks):
                own = [(color, parts[place]) for color, place in enumerate(places, 1)]
                mine = [(color, group) for color, group in own if group is not None]
                if not mine:
                    engine.sit_out_split()
                for color, group in mine:  # one at most: the groups of a round share no rank
                    (child,) = (b for b in group.backends_with("splits") if b.name == engine.name)
                    child.split_off(engine, color)

    def _is_agreed(self) -> bool:
        """Meet the other ranks; return whether all of them split."""
        began, self.meeting.entry = time.monotonic(), self._entry()
        try:
            if wait_for_verdicts([self.meeting], self._limit, self._watch) is not None:
                raise self.meeting.error(time.monotonic() - began)
        except DureError as error:
            self.meeting.give_up(error)
            _log.info("groups make communicators of their own: %s", error)
            return False
        earlier, self._engine.split_meetings = self._engine.split_meetings[:-1], [self.meeting]
        if self._engine.rank == 0:  # all have come, so that none reads earlier verdicts any more
            with suppress(DureError):
                for each in earlier:
                    each.forget()
        return self.meeting.summary == _SPLIT

    def _watch(self) -> float:
        self._engine.check("new_group")
        return _LOOK_S

    def _entry(self) -> bytes:
        bound = self._parent.bound_device_id
        if any(spec.device_id != bound for spec in self._specs):
            return _APART
        text = repr([(spec.global_ranks, spec.backend) for spec in self._specs])
        return hashlib.blake2b(text.encode(), digest_size=8).digest()
