"""Continuing without some ranks: a new group of the ranks that are left.

Note "Agreement". Ranks notice a death at different times, and more ranks may die in the meantime.
So they agree in the store, in attempts; each attempt has its own keys and two steps:

1. *Which ranks are left?* Each rank publishes that it takes part, and waits until every other rank
   has done so or is known to have ended. The first rank for which that holds proposes the list; the
   first proposal counts.
2. *Is the group complete?* The ranks of the list build the group. A rank that sees that all have
   built it proposes yes; a rank that fails, or sees that one of them ended, proposes no. The first
   proposal counts. After a no all ranks close their group and begin the next attempt.

Every decision is one compare-and-set, so all ranks decide the same, whatever each has seen. An
attempt without further deaths takes some round trips to the store and the creation of a group.

The store is the launcher's, or one that the caller passed. If rank 0 serves it, because there is no
launcher, its death leaves no store: `StoreLost`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from dure.comm.creation import GroupSpec, as_timeout, check_ranks, create_groups
from dure.comm.group import ProcessGroup
from dure.comm.world import World, current_world, resolve
from dure.errors import (
    DureError,
    PeerLost,
    RendezvousError,
    RendezvousTimeout,
    StoreLost,
    StoreTimeout,
    UsageError,
)
from dure.store.base import Store
from dure.store.prefix import PrefixStore
from dure.store.rendezvous import Rendezvous

SHRINK_DEFAULT = 0
"""Pending operations of the old group are completed first, if no rank of it has failed."""

SHRINK_ABORT = 1
"""Pending operations of the old group end with `Aborted`."""

_ENDING_S = 10.0
"""How long a process may take to end after its connections have closed, on a busy host."""

_LOOK = timedelta(milliseconds=10)


class _Decision(msgspec.Struct, array_like=True, frozen=True):
    """The ranks of the old group that are left; `missing` are alive but did not call."""

    left: tuple[int, ...]
    missing: tuple[int, ...] = ()


_pack = msgspec.msgpack.encode
_read = msgspec.msgpack.Decoder(_Decision).decode


def shrink(group: ProcessGroup | None = None, timeout: timedelta | None = None) -> ProcessGroup:
    """Make a new group of the ranks that are left, usually after a failure.

    Ranks whose process has ended, or that have left the group, are excluded; for ranks of a lost
    host it waits at most three seconds after the loss. The old group is destroyed. If it was the
    default group, all other groups are destroyed too, the new one becomes the default group, and
    global ranks get new numbers, in the old order.

    Args:
        group: The group to shrink; the default group if None.
        timeout: How long to wait for ranks that are alive but have not called. If None, the timeout
            of the group's creation: the group's timeout, or 5 minutes by default.

    Returns:
        The new group. It has the size of the old one if no rank has ended.

    Raises:
        RendezvousTimeout: A rank that is alive did not call; `missing` names it. The old group is
            unchanged.
        RendezvousError: The others continued without this rank.
        StoreLost: The store has died with rank 0, which served it.

    Collective:
        All ranks of the group that are left call.

    Cost:
        Milliseconds, and until the slowest rank calls.

    Example:
        ```python
        group = dist.shrink(dist.new_group([0, 1]))  # after a PeerLost: without the lost ranks
        assert group.size() == 2  # none was lost
        ```
    """
    return _Shrinking(group, "shrink", (), timeout).run()


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object = None,
) -> ProcessGroup:
    """Make a new group without some ranks, as `torch.distributed.shrink_group`.

    Args:
        ranks_to_exclude: Ranks of `group`, dead or alive; at least one, and not all.
        group: The group to shrink; the default group if None.
        shrink_flags: `SHRINK_DEFAULT`, or `SHRINK_ABORT` to abort pending operations of the old
            group.
        pg_options: Options of the new backend, as in `new_group`.

    Returns:
        The new group; the old one and other groups are destroyed as by `shrink`.

    Raises:
        TypeError: `ranks_to_exclude` is not a list.
        UsageError: It is empty, names a rank that is not in the group or twice, or all of them, or
            this one; or there are no such flags.
        PeerLost: Another rank has ended: exclude it too, or call `shrink`.
        RendezvousTimeout: A rank did not call; `missing` names it.

    Collective:
        The ranks that are not excluded call, with equal arguments.

    Example:
        ```python
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 0:  # the ranks that stay call
            assert dist.shrink_group([1], pair).size() == 1
        ```
    """
    if not isinstance(ranks_to_exclude, list):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"ranks_to_exclude must be a list, got {type(ranks_to_exclude).__name__}")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise UsageError(
            "shrink_flags must be SHRINK_DEFAULT or SHRINK_ABORT",
            op="shrink_group",
            seen=f"got {shrink_flags!r}",
        )
    parent = resolve(group, "shrink_group")
    excluded = check_ranks(ranks_to_exclude, parent.size(), "shrink_group")
    if len(excluded) == parent.size() or parent.rank() in excluded:
        raise UsageError(
            "a rank that is excluded must not call shrink_group",
            op="shrink_group",
            group=parent.group_name,
            rank=parent.rank(),
            seen=f"ranks_to_exclude={ranks_to_exclude}",
        )
    work = _Shrinking(parent, "shrink_group", excluded, None)
    work.pg_options, work.abort = pg_options, shrink_flags == SHRINK_ABORT
    return work.run()


class _Shrinking:
    """One rank's side of the agreement (see the module's text). Ranks are those of `parent`."""

    def __init__(
        self, group: object, op: str, excluded: Sequence[int], timeout: timedelta | None
    ) -> None:
        self.parent, self.op, self.excluded = resolve(group, op), op, frozenset(excluded)
        self.world: World = current_world()
        self.limit = as_timeout(timeout, self.parent.creation_timeout)
        self.pg_options: object = None
        self.abort = True
        if self.parent.closed or self.world.rendezvous is None:
            raise UsageError(
                "the process group has been destroyed", op=op, group=self.parent.group_name
            )
        self.rendezvous: Rendezvous = self.world.rendezvous
        if self.rendezvous.alone:
            raise UsageError(
                "the other ranks do not exist: none of them can have failed",
                op=op,
                group=self.parent.group_name,
                seen="the default group uses the backend 'fake'",
                fix="Make a smaller group with dure.new_group.",
            )

    def run(self) -> ProcessGroup:
        """Make attempts until one succeeds."""
        deadline = time.monotonic() + self.limit.total_seconds()
        while True:
            self.rendezvous.require_store(self.op)
            try:
                group = self._try(deadline)
            except StoreLost:
                self._name_who_served_the_store()
                raise
            if group is not None:
                return group

    def _name_who_served_the_store(self) -> None:
        """Raise the error that names the rank, which is known once its process has ended."""
        deadline = time.monotonic() + _ENDING_S
        while self.rendezvous.held_on_this_host and time.monotonic() < deadline:
            self.rendezvous.require_store(self.op)
            time.sleep(_LOOK.total_seconds())

    def _try(self, deadline: float) -> ProcessGroup | None:
        self.parent.num_attempts += 1
        name = f"{self.parent.group_name}/shrunk/{self.parent.num_attempts}"
        keys = PrefixStore(f"shrink/{name}", self.rendezvous.store)
        left = self._who_is_left(keys, deadline)
        built = self._build(name, keys, left)
        complete = False
        try:
            complete = self._is_complete(keys, left, built, deadline)
        finally:
            if built is not None and not complete:
                self.world.groups.pop(built.group_name, None)
                built.close(abort=True)
        return self._replace_parent(left, built) if complete and built is not None else None

    # ---- who has ended -----------------------------------------------------------------------

    def _gone(self, rank: int) -> bool:
        return (
            rank in self.excluded
            or self.parent.gone(rank)
            or self.rendezvous.ended(self.parent.global_ranks[rank])
        )

    # ---- step 1 ------------------------------------------------------------------------------

    def _who_is_left(self, keys: Store, deadline: float) -> tuple[int, ...]:
        keys.set(f"here/{self.parent.rank()}", b"")
        while not keys.check(["left"]):
            waited_for = self._not_yet(keys, "here", range(self.parent.size()))
            if not waited_for or time.monotonic() > deadline:
                here = [r for r in range(self.parent.size()) if keys.check([f"here/{r}"])]
                left = tuple(r for r in here if r not in self.excluded and not self._gone(r))
                keys.compare_set("left", "", _pack(_Decision(left, tuple(waited_for))))
        decision = _read(keys.get("left"))
        self._check(decision)
        return decision.left

    def _not_yet(self, keys: Store, step: str, ranks: Sequence[int]) -> list[int]:
        """Wait a moment; return the ranks that have neither reached this step nor ended."""
        awaited = [r for r in ranks if not self._gone(r)]
        try:
            keys.wait([f"{step}/{r}" for r in awaited], _LOOK)
        except StoreTimeout:
            late = [r for r in awaited if not self.parent.silent(r)]
            return [r for r in late if not keys.check([f"{step}/{r}"])]
        return []

    def _check(self, decision: _Decision) -> None:
        where: dict[str, Any] = {
            "op": self.op,
            "group": self.parent.group_name,
            "rank": self.parent.rank(),
            "world_size": self.parent.size(),
        }
        if decision.missing:
            raise RendezvousTimeout(
                "not all ranks that are alive called to shrink the group",
                came=decision.left,
                missing=decision.missing,
                elapsed_s=self.limit.total_seconds(),
                seen=f"missing are ranks {list(decision.missing)}",
                fix="All ranks that are left must call it; shrink_group can exclude ranks.",
                **where,
            )
        if self.parent.rank() not in decision.left:
            raise RendezvousError(
                "the other ranks continued without this one",
                seen=f"left are ranks {list(decision.left)}",
                fix="End this process: it was assumed dead, or called too late.",
                **where,
            )
        lost = set(range(self.parent.size())) - self.excluded - set(decision.left)
        if self.op == "shrink_group" and lost:
            raise PeerLost(
                f"rank {min(lost)} ended, and is not in ranks_to_exclude",
                peer=min(lost),
                fix="Exclude it, too, or call shrink(), which finds the ranks that are left.",
                **where,
            )

    # ---- step 2 ------------------------------------------------------------------------------

    def _build(self, name: str, keys: Store, left: tuple[int, ...]) -> ProcessGroup | None:
        """Build the new group, or propose that it is not complete."""
        is_default = self.parent is self.world.default
        spec = GroupSpec(
            name=name,
            global_ranks=tuple(self.parent.global_ranks[r] for r in left),
            backend=self.parent.backend_config,
            timeout=self.parent.timeout,
            desc="default:shrunken" if is_default else f"{self.parent.group_name}:shrunk",
            pg_options=self.pg_options,
            device_id=self.parent.bound_device_id,
            creation_timeout=self.limit,
        )
        me = self.parent.global_ranks[self.parent.rank()]
        try:
            return create_groups(self.world, self.rendezvous.store, me, [spec])[0]
        except DureError:
            if keys.compare_set("stands", "", b"no") != b"no":
                raise
            if all(not self._gone(r) for r in left):
                raise  # it failed for another reason, and would fail again
            return None

    def _is_complete(
        self,
        keys: Store,
        left: tuple[int, ...],
        built: ProcessGroup | None,
        deadline: float,
    ) -> bool:
        if built is not None:
            keys.set(f"built/{self.parent.rank()}", b"1")
        while not keys.check(["stands"]):
            waited_for = self._not_yet(keys, "built", left)
            if not waited_for or time.monotonic() > deadline:
                all_built = all(keys.check([f"built/{r}"]) for r in left)
                keys.compare_set("stands", "", b"yes" if all_built else b"no")
        return keys.get("stands") == b"yes"

    # ---- the end -----------------------------------------------------------------------------

    def _replace_parent(self, left: tuple[int, ...], built: ProcessGroup) -> ProcessGroup:
        world, parent = self.world, self.parent
        if parent is not world.default:
            world.groups.pop(parent.group_name, None)
            parent.close(self.abort)
            return built
        kept = [parent.global_ranks[r] for r in left]
        for old in sorted(world.groups.values(), key=lambda g: g is parent):
            if old is not built:
                old.close(abort=True)
        self.rendezvous.go_on_with(kept, built.group_name)
        built.renumber(tuple(range(len(left))))
        with world.lock:
            world.groups = {built.group_name: built}
            world.default = built
            world.num_created, world.created_locally = 0, {}
        return built
