"""`TorchGroup`: the object that torch.distributed works with, and groups made from groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from dure.comm.creation import as_timeout, check_ranks
from dure.torch_backend.engine import Plan, build
from dure.torch_backend.messages import Messages
from dure.torch_backend.moves import Moves
from dure.torch_backend.reductions import Reductions

__all__ = ["TorchGroup", "make"]


class TorchGroup(Reductions, Moves, Messages):
    """The ranks of one group, for torch.distributed.

    All checks, copies to plain memory, numbers and traces are those of Dure's own `ProcessGroup`
    (`ours`); this class turns torch's calls into its calls, and its works into torch's.

    Threads: one operation at a time; works may be used from any thread.
    """

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> TorchGroup | None:
        """Make a group of some of this group's ranks; only they need to call.

        Args:
            ranks: Ranks of this group, in the order of their ranks in the new one.
            timeout: This group's where None.
            opts: Handed to the backend untouched.
            group_name: The same on all members.
            group_desc: What it is for.
            device_types: The devices it is to serve; this backend serves one kind.

        Returns:
            The group; None on ranks outside it.
        """
        del device_types
        check_ranks(ranks, self.size(), "split_group")
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'-'.join(map(str, ranks))}"
        plan = Plan(
            store=c10d.PrefixStore(f"{name}/", self.get_group_store()),
            rank=list(ranks).index(self.rank()),
            global_ranks=tuple(self.ours.global_ranks[r] for r in ranks),
            timeout=as_timeout(timeout, self.ours.timeout),
            name=name,
            desc=group_desc or f"{self.group_desc}:split",
            pg_options=opts,
        )
        return make(plan, self.name())

    splitGroup = split_group

    def merge_remote_group(
        self,
        store: c10d.Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> TorchGroup:
        """Make one group of this one's ranks and those of others that use the same `store`.

        Args:
            store: A store that all members of the new group share.
            size: Ranks of the new group. They are numbered as they come.
            timeout: This group's where None.
            group_name: The same on all members.
            group_desc: What it is for.
        """
        name = group_name or "merged"
        rank = store.add(f"{name}/members", 1) - 1
        plan = Plan(
            store=c10d.PrefixStore(f"{name}/", store),
            rank=rank,
            global_ranks=tuple(range(size)),
            timeout=as_timeout(timeout, self.ours.timeout),
            name=name,
            desc=group_desc or f"{self.group_desc}:merge",
        )
        return make(plan, self.name())

    def mergeRemoteGroup(self, store: c10d.Store, opts: Any, size: int) -> TorchGroup:
        """Do `merge_remote_group`, as C++ calls it."""
        return self.merge_remote_group(store, size, opts.timeout, opts.group_name, opts.group_desc)


def make(plan: Plan, backend_name: str) -> TorchGroup:
    """Build this rank's side of a group; every one of its ranks must do so."""
    return TorchGroup(build(plan), plan.store, backend_name)
