"""Point-to-point messages of a process group.

Messages between one pair of ranks with one tag arrive in the order they were sent. A receive
without a source takes the first message with its tag, whoever sent it.
"""

from __future__ import annotations

import torch

from dure.comm import checks
from dure.comm.backends.base import Backend, Ticket
from dure.comm.group.core import GroupCore
from dure.comm.work import Work
from dure.errors import UsageError

__all__ = ["Messaging"]

_NUM_TAGS = 0x7FFFFFF0
"""What every backend has; those above, of 31 bits, are the backends' own."""


class Messaging(GroupCore):
    """Operations between two ranks."""

    def _check_peer(self, peer: int | None, op: str, tag: int) -> None:
        if peer == self._rank:
            raise UsageError(
                "a rank cannot send to or receive from itself",
                op=op,
                rank=self._rank,
                group=self.group_name,
                fix="Copy the tensor instead.",
            )
        if not 0 <= tag < _NUM_TAGS:
            raise UsageError(
                f"a tag must lie between 0 and {_NUM_TAGS - 1}",
                op=op,
                rank=self._rank,
                seen=f"{tag}",
            )

    def send(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, async_op: bool = False
    ) -> Work | None:
        """Send `tensor` to group rank `dst`."""
        op = "isend" if async_op else "send"
        backend = self._backend(op, tensor)
        self._check_peer(dst, op, tag)
        source = checks.readable(tensor)
        return self._issue(
            op,
            lambda a: backend.send(source, dst, tag, a),
            [tensor],
            async_op=async_op,
            data=source,
            peer=dst,
            detail=tag,
        )

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> int:
        """Receive into `tensor` from group rank `src`, or anyone; return the sender's rank."""
        backend, memory, finish = self._prepare_receive(tensor, src, tag, "recv")
        tickets: list[Ticket] = []

        def call(async_op: bool) -> Ticket:
            tickets.append(backend.recv(memory, src, tag, async_op))
            return tickets[0]

        work = self._issue("recv", call, [tensor], finish=finish, data=memory, peer=src, detail=tag)
        if work is not None:
            work.wait()
        return tickets[0].source

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> Work:
        """Begin to receive into `tensor` from group rank `src`, or anyone."""
        backend, memory, finish = self._prepare_receive(tensor, src, tag, "irecv")
        work = self._issue(
            "irecv",
            lambda a: backend.recv(memory, src, tag, a),
            [tensor],
            finish=finish,
            async_op=True,
            data=memory,
            peer=src,
            detail=tag,
        )
        assert work is not None
        return work

    def _prepare_receive(
        self, tensor: torch.Tensor, src: int | None, tag: int, op: str
    ) -> tuple[Backend, torch.Tensor, checks.Finish | None]:
        backend = self._backend(op, tensor)
        self._check_peer(src, op, tag)
        memory, finish = checks.writable(tensor, load=False, op=op)
        return backend, memory, finish
