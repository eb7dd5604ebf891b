"""Headers: the short messages with which every collective over MPI begins.

Each rank sends every other rank its *header* (backends/header.py). If it has few bytes for the
receiver, they are sent with it (*inline*), so that small collectives need only headers.

The headers of all operations use the same memory and the same persistent requests. That is safe
because a group's collectives run one after another, and MPI keeps the order of messages between two
ranks: a peer is at most one operation ahead.

Cost:
    Each rank sends n - 1 messages of `HEADER` bytes; one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.comm.backends.header import CALL_BYTES, HEADER_BYTES, Header, difference
from dure.comm.backends.mpi.memory import Piece
from dure.comm.call import Fingerprint

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HEADER", "INLINE", "POLL", "Headers", "Stage"]

INLINE = 256
HEADER = HEADER_BYTES + INLINE


class Stage(NamedTuple):
    """Requests that run together, receives first.

    Attributes:
        requests: Of MPI.
        peers: The other rank of each; -1 for any rank.
        num_receives: How many of them are receives, which can be canceled.
    """

    requests: list[Any]
    peers: Sequence[int]
    num_receives: int = 0


POLL = Stage([], [])
"""A stage without requests: the operation continues at the next poll."""


class Headers:
    """The headers of one group, seen from one rank.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        tag: Of headers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, tag: int) -> None:
        self._mpi, self._rank, self._size = mpi, comm.Get_rank(), comm.Get_size()
        self._memory = torch.zeros((2, self._size, HEADER), dtype=torch.uint8, device="cpu")
        start = self._memory.data_ptr()
        slots = [mpi.memory.fromaddress(start + i * HEADER, HEADER) for i in range(2 * self._size)]
        self._out = [memoryview(slot) for slot in slots[: self._size]]
        self._in = [memoryview(slot) for slot in slots[self._size :]]
        self._in_address = start + self._size * HEADER
        self._peers = [r for r in range(self._size) if r != self._rank]
        sends = [comm.Send_init(slots[r], r, tag) for r in self._peers]
        receives = [comm.Recv_init(slots[self._size + r], r, tag) for r in self._peers]
        both = [*self._peers, *self._peers]
        self._stage = Stage([*receives, *sends], both, len(receives))
        self._mine = b""
        self._fingerprint = Fingerprint(0)

    def start(self, header: Header, gives: Sequence[Piece]) -> Stage:
        """Send the headers of a call.

        Args:
            header: Of the call.
            gives: The memory that this rank sends to each; few bytes are sent with the header.
        """
        self._fingerprint, self._mine = header.fingerprint, header.pack()
        for r in self._peers:
            out, (address, nbytes) = self._out[r], gives[r]
            out[:HEADER_BYTES] = self._mine
            if 0 < nbytes <= INLINE:
                there = self._mpi.memory.fromaddress(address, nbytes)
                out[HEADER_BYTES : HEADER_BYTES + nbytes] = there
        if self._peers:
            self._mpi.Prequest.Startall(self._stage.requests)
        return self._stage

    def check(self) -> None:
        """Compare the calls of all ranks.

        Raises:
            Desync: They differ; `calls` has the call of each rank.
        """
        mine, said = self._mine[:CALL_BYTES], self._fingerprint
        same = all(bytes(self._in[r][:CALL_BYTES]) == mine for r in self._peers)
        if same and not (said.own or said.expected or said.sends):
            return
        headers = [Header.unpack(self._in[r]) for r in range(self._size)]
        headers[self._rank] = Header.unpack(self._mine)
        record = difference(headers)
        if record is not None:
            raise record.error()

    def copy_back(self, takes: Sequence[Piece]) -> None:
        """Copy the bytes that arrived with the headers to their place."""
        for r in self._peers:
            address, nbytes = takes[r]
            if 0 < nbytes <= INLINE and address != self.inline_address(r):
                there = memoryview(self._mpi.memory.fromaddress(address, nbytes))
                there[:] = self._in[r][HEADER_BYTES : HEADER_BYTES + nbytes]

    def inline_address(self, rank: int) -> int:
        """Return the address of the bytes that arrived with the header of `rank`."""
        return self._in_address + rank * HEADER + HEADER_BYTES
