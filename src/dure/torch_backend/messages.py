"""Point-to-point operations, and coalescing.

Sends and receives never block here: torch's `send` waits for the work that it gets, and a batch
starts its operations one after another, so a blocking send could wait for a receive that comes
later in the same batch.
"""

from __future__ import annotations

from typing import Any

import torch

from dure.torch_backend.calls import Mode, only
from dure.torch_backend.identity import TorchGroupBase
from dure.torch_backend.profiling import profiled
from dure.torch_backend.work import TorchWork
from dure.torch_private import c10d

__all__ = ["PointToPoint", "ReceiveWork"]

_ASYNC: Mode = (True, None)


class ReceiveWork(TorchWork):
    """A pending receive, which reports the sender."""

    group_rank_of: Any = None

    def source_rank(self) -> int:
        """Return the sender, as a rank of the group (torch makes a global rank of it)."""
        source = self._work.source_rank()
        return source if source < 0 else self.group_rank_of(source)

    _source_rank = source_rank


class PointToPoint(TorchGroupBase):
    """Point-to-point operations, and coalescing."""

    @profiled("send")
    def send(self, tensors: Any, dst: int, tag: int = 0) -> c10d.Work:
        """Start to send the only tensor of `tensors` to group rank `dst`."""
        work = self.ours.send(only(tensors, "send"), dst, tag, async_op=True)
        return self._wrap(work, _ASYNC)

    @profiled("recv")
    def recv(self, tensors: Any, src: int, tag: int = 0) -> c10d.Work:
        """Start to receive into the only tensor of `tensors` from group rank `src`."""
        return self._receive(tensors, src, tag)

    @profiled("recvAnySource")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> c10d.Work:
        """Start to receive into the only tensor of `tensors` from the first rank that sends."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, src: int | None, tag: int) -> c10d.Work:
        ours = self.ours.irecv(only(tensors, "recv"), src, tag)
        work = ReceiveWork(ours, self._unwaited, self._waiters)
        work.group_rank_of = self.ours.group_rank
        return work

    # ---------------------------------------------------------------- several operations as one

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Start to collect works; works of an earlier failed block are dropped.

        Unlike `dure.coalescing_manager`, this does not exclude other threads: torch does not report
        the end of a failed block, which would exclude them forever. Their works are not collected.
        """
        del device
        self.ours.coalesce([])

    def _end_coalescing(self, device: torch.device | None = None) -> c10d.Work:
        """Return one work for all operations since `_start_coalescing`."""
        del device
        works = self.ours.coalesced or []
        self.ours.coalesce(None)
        return self._joined(works, [], _ASYNC)
