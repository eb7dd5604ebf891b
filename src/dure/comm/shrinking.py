"""Going on without some ranks: a new group of those that are left.

Note "Agreement". Ranks learn of a death at different times, and more may die meanwhile. So they
agree, in the store, in attempts; each attempt has keys of its own and two steps:

1. *Who is left?* Everyone says that it is here, and waits until each other rank is here too, or is
   known to have ended. Whoever sees that first proposes the list; the first proposal counts.
2. *Does it stand?* The ranks of the list build the group. Whoever sees that all have built it
   proposes yes; whoever fails, or sees that one of them ended, proposes no. The first proposal
   counts. After a no all close what they built and begin the next attempt.

Every decision is one compare-and-set, so all ranks take the same way, whatever each has seen. An
attempt in which nobody dies takes some round trips to the store and the making of a group.

The store is the launcher's, or the one that the caller named. Where rank 0 serves it, for there is
no launcher, its death leaves nothing to agree in: `StoreLost`.
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
"""Pending operations of the old group end before it does, where it is whole."""

SHRINK_ABORT = 1
"""Pending operations of the old group end with `Aborted`."""

_ENDING_S = 10.0
"""For a process to end after its connections have closed, on a busy host."""

_LOOK = timedelta(milliseconds=10)


class _Decision(msgspec.Struct, array_like=True, frozen=True):
    """Who is left, by rank of the old group; `missing` are ranks that live but did not come."""

    left: tuple[int, ...]
    missing: tuple[int, ...] = ()


_pack = msgspec.msgpack.encode
_read = msgspec.msgpack.Decoder(_Decision).decode


def shrink(group: ProcessGroup | None = None, timeout: timedelta | None = None) -> ProcessGroup:
    """Make a new group of the ranks that are left, after a failure or in place of one.

    Ranks are left unless their process has ended or they have left the group; ranks of a host that
    is lost are waited for no longer than three seconds after it was lost. The old group is
    destroyed; where it was the default group, all other groups are too, the new one becomes the
    default group, and global ranks are numbered anew, in the old order.

    Args:
        group: The group to shrink; the default group where None.
        timeout: How long to wait for ranks that live but have not called. Where None, as long as
            making the group waited: its timeout, or 5 minutes where the program gave none.

    Returns:
        The new group. Its size may be that of the old one, if nobody has ended.

    Raises:
        RendezvousTimeout: A rank that lives did not call; `missing` says which. The old group is
            left as it is.
        RendezvousError: The others went on without this rank.
        StoreLost: The store has died with rank 0, which served it.

    Collective:
        All ranks of the group that are left call.

    Cost:
        Milliseconds, and until the slowest rank calls.
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
        group: The group to shrink; the default group where None.
        shrink_flags: `SHRINK_DEFAULT`, or `SHRINK_ABORT` to abort what is pending in the old group.
        pg_options: Options of the new backend, as in `new_group`.

    Returns:
        The new group; what becomes of the old one, and of others, is told at `shrink`.

    Raises:
        TypeError: `ranks_to_exclude` is not a list.
        UsageError: It is empty, names a rank that is not in the group or twice, or all of them, or
            this one; or there are no such flags.
        PeerLost: A further rank has ended: exclude it too, or call `shrink`.
        RendezvousTimeout: A rank did not call; `missing` says which.

    Collective:
        The ranks that are not excluded call, with equal arguments.
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
        """Make attempts until one stands."""
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
        """Raise the error that names the rank; its death is told before its process has ended."""
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
        stands = False
        try:
            stands = self._stands(keys, left, built, deadline)
        finally:
            if built is not None and not stands:
                self.world.groups.pop(built.group_name, None)
                built.close(abort=True)
        return self._replace_parent(left, built) if stands and built is not None else None

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
        """Wait a moment; return who has neither come to this step nor ended."""
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
                "not all ranks that live came to shrink the group",
                came=decision.left,
                missing=decision.missing,
                elapsed_s=self.limit.total_seconds(),
                seen=f"missing are ranks {list(decision.missing)}",
                fix="All ranks that are left must call it; shrink_group excludes ranks by name.",
                **where,
            )
        if self.parent.rank() not in decision.left:
            raise RendezvousError(
                "the other ranks went on without this one",
                seen=f"left are ranks {list(decision.left)}",
                fix="End this process; it was taken for dead, or called too late.",
                **where,
            )
        lost = set(range(self.parent.size())) - self.excluded - set(decision.left)
        if self.op == "shrink_group" and lost:
            raise PeerLost(
                f"rank {min(lost)} ended, and was not to be excluded",
                peer=min(lost),
                fix="Exclude it, too, or call shrink(), which finds out who is left.",
                **where,
            )

    # ---- step 2 ------------------------------------------------------------------------------

    def _build(self, name: str, keys: Store, left: tuple[int, ...]) -> ProcessGroup | None:
        """Build the new group, or tell the others that it does not stand."""
        is_default = self.parent is self.world.default
        spec = GroupSpec(
            name=name,
            global_ranks=tuple(self.parent.global_ranks[r] for r in left),
            backend=self.parent.backend_config,
            timeout=self.parent.timeout,
            desc="default:shrunken" if is_default else f"{self.parent.group_name}:shrunk",
            pg_options=self.pg_options,
            creation_timeout=self.limit,
        )
        me = self.parent.global_ranks[self.parent.rank()]
        try:
            return create_groups(self.world, self.rendezvous.store, me, [spec])[0]
        except DureError:
            if keys.compare_set("stands", "", b"no") != b"no":
                raise
            if all(not self._gone(r) for r in left):
                raise  # it failed for another reason, and would again
            return None

    def _stands(
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
                whole = all(keys.check([f"built/{r}"]) for r in left)
                keys.compare_set("stands", "", b"yes" if whole else b"no")
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
