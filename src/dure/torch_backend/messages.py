"""Messages between two ranks, and operations that are started together.

Sends and receives never block here, whether torch's caller is `send` (which waits for the work it
gets) or `isend`: a batch of them is started one after another, and a send that waited for its
receive would wait for one that stands further down in the same batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from dure.torch_backend.calls import Mode, only
from dure.torch_backend.identity import Identity
from dure.torch_backend.profiling import profiled
from dure.torch_backend.work import TorchWork

__all__ = ["Messages", "ReceiveWork"]

_ASYNC: Mode = (True, None)


class ReceiveWork(TorchWork):
    """A pending receive, which knows who sent what it got."""

    group_rank_of: Any = None

    def source_rank(self) -> int:
        """Return the sender, as a rank of the group (torch makes a global rank of it)."""
        source = self._work.source_rank()
        return source if source < 0 else self.group_rank_of(source)

    _source_rank = source_rank


class Messages(Identity):
    """Point-to-point operations, and coalescing."""

    @profiled("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> c10d.Work:
        """Begin to send the one tensor of `tensors` to group rank `dst`."""
        work = self.ours.send(only(tensors, "send"), dst, tag, async_op=True)
        return self._wrap(work, _ASYNC)

    @profiled("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> c10d.Work:
        """Begin to receive into the one tensor of `tensors` from group rank `src`."""
        return self._receive(tensors, src, tag)

    @profiled("recvAnySource")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> c10d.Work:
        """Begin to receive into the one tensor of `tensors` from whoever sends first."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, src: int | None, tag: int) -> c10d.Work:
        ours = self.ours.irecv(only(tensors, "recv"), src, tag)
        work = ReceiveWork(ours, self._keeper, self._waiters)
        work.group_rank_of = self.ours.group_rank
        return work

    # ---------------------------------------------------------------- several operations as one

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin to collect works. What an earlier failed block has left behind is forgotten.

        Other threads are not kept out, as `dure.coalescing_manager` does: torch calls no end of a
        block that fails, so they would be kept out for good. Their works are not collected.
        """
        del device
        self.ours.coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> c10d.Work:
        """Return one work for all that was started since `_start_coalescing`."""
        del device
        works, self.ours.coalesced = self.ours.coalesced or [], None
        return self._joined(works, [], _ASYNC)
