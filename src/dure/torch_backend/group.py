"""`TorchGroup`: the object that torch.distributed works with, and groups made from groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from dure.comm.creation import as_timeout, check_ranks
from dure.comm.rank_text import name_of_ranks
from dure.torch_backend.engine import GroupRequest, build
from dure.torch_backend.messages import PointToPoint
from dure.torch_backend.moves import Moves
from dure.torch_backend.reductions import ReductionOperations
from dure.torch_private import c10d

__all__ = ["TorchGroup", "make"]


class TorchGroup(ReductionOperations, Moves, PointToPoint):
    """A process group of torch.distributed that runs its operations on a group of Dure (`ours`).

    This class only converts torch's calls to calls of `ours`, and works of `ours` to torch's.

    Threads:
        One operation at a time; works may be used from any thread.
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
            timeout: The new group's timeout; None for this group's.
            opts: Options for the backend.
            group_name: Name of the new group, the same on all members.
            group_desc: Description of the new group.
            device_types: Ignored: this backend serves one kind of device.

        Returns:
            The group; None on ranks outside it.
        """
        del device_types
        check_ranks(ranks, self.size(), "split_group")
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{name_of_ranks(ranks)}"
        request = GroupRequest(
            store=c10d.PrefixStore(f"{name}/", self.get_group_store()),
            rank=list(ranks).index(self.rank()),
            global_ranks=tuple(self.ours.global_ranks[r] for r in ranks),
            timeout=as_timeout(timeout, self.ours.timeout),
            name=name,
            desc=group_desc or f"{self.group_desc}:split",
            pg_options=opts,
        )
        return make(request, self.name())

    splitGroup = split_group

    def merge_remote_group(
        self,
        store: c10d.Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> TorchGroup:
        """Make one group of the ranks of this group and of other groups that use the same store.

        Args:
            store: A store that all members of the new group share.
            size: Number of ranks of the new group; they are numbered in the order of arrival.
            timeout: The new group's timeout; None for this group's.
            group_name: Name of the new group, the same on all members.
            group_desc: Description of the new group.
        """
        name = group_name or "merged"
        rank = store.add(f"{name}/members", 1) - 1
        request = GroupRequest(
            store=c10d.PrefixStore(f"{name}/", store),
            rank=rank,
            global_ranks=tuple(range(size)),
            timeout=as_timeout(timeout, self.ours.timeout),
            name=name,
            desc=group_desc or f"{self.group_desc}:merge",
        )
        return make(request, self.name())

    def mergeRemoteGroup(self, store: c10d.Store, opts: Any, size: int) -> TorchGroup:
        """Call `merge_remote_group` with the arguments that C++ passes."""
        return self.merge_remote_group(store, size, opts.timeout, opts.group_name, opts.group_desc)


def make(request: GroupRequest, backend_name: str) -> TorchGroup:
    """Build this rank's side of a group; all its ranks must call."""
    return TorchGroup(build(request), request.store, backend_name)
