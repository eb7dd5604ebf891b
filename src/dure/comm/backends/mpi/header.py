"""Headers: the short messages with which every collective over MPI begins.

Each rank sends every other rank one *header* of fixed size. It holds the call's fingerprint
(comm/call.py), the line of the program that made it, and, where this rank gives the receiver few
bytes, these bytes themselves (*inline*), so that a small collective needs nothing but headers. All
ranks see all fingerprints before any data are touched, so all of them find the same mismatch.

The headers of all operations are sent and received in the same memory by the same persistent
requests. That is safe because a group's collectives run one after another, and MPI keeps the order
of messages between two ranks: a peer that is already at the next operation is at most that far.

Cost: n - 1 messages of `HEADER` bytes a rank; one step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.mpi.memory import Piece
from dure.comm.call import SIZE, Fingerprint, compare

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HEADER", "INLINE", "Headers", "Stage"]

HEADER = 512
INLINE = 256
_SEQ = struct.Struct("<Q")
_SITE_AT = _SEQ.size + SIZE
_INLINE_AT = HEADER - INLINE
_SITE_BYTES = _INLINE_AT - _SITE_AT


class Stage(NamedTuple):
    """Requests that run together, receives first.

    Attributes:
        requests: Of MPI.
        peers: The rank that each is with; -1 for anyone.
        num_receives: How many of them are receives; these can be called off.
        statuses: Filled when all have ended, where they matter.
    """

    requests: list[Any]
    peers: Sequence[int]
    num_receives: int = 0
    statuses: list[Any] | None = None


class Headers:
    """The headers of one group, seen from one rank.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The group's communicator.
        tag: Which messages are headers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, tag: int) -> None:
        self._mpi, self._rank, self._size = mpi, comm.Get_rank(), comm.Get_size()
        self._memory = torch.zeros((2, self._size, HEADER), dtype=torch.uint8)
        start = self._memory.data_ptr()
        spots = [mpi.memory.fromaddress(start + i * HEADER, HEADER) for i in range(2 * self._size)]
        self._out = [memoryview(spot) for spot in spots[: self._size]]
        self._in = [memoryview(spot) for spot in spots[self._size :]]
        self._in_address = start + self._size * HEADER
        self._peers = [r for r in range(self._size) if r != self._rank]
        sends = [comm.Send_init(spots[r], r, tag) for r in self._peers]
        receives = [comm.Recv_init(spots[self._size + r], r, tag) for r in self._peers]
        both = [*self._peers, *self._peers]
        self._stage = Stage([*receives, *sends], both, len(receives))
        self._mine = b""
        self._fingerprint = Fingerprint(0)

    def start(self, fingerprint: Fingerprint, seq: int, site: str, gives: Sequence[Piece]) -> Stage:
        """Send the headers of a call.

        Args:
            fingerprint: What is called.
            seq: Its number.
            site: File and line of the program.
            gives: What this rank is about to send to each; few bytes are sent at once.
        """
        self._fingerprint = fingerprint
        where = site.encode()[-_SITE_BYTES:].ljust(_SITE_BYTES, b"\0")
        self._mine = _SEQ.pack(seq) + fingerprint.pack() + where
        for r in self._peers:
            out, (address, nbytes) = self._out[r], gives[r]
            out[:_INLINE_AT] = self._mine
            if 0 < nbytes <= INLINE:
                there = self._mpi.memory.fromaddress(address, nbytes)
                out[_INLINE_AT : _INLINE_AT + nbytes] = there
        if self._peers:
            self._mpi.Prequest.Startall(self._stage.requests)
        return self._stage

    def check(self) -> None:
        """Compare the calls of all ranks.

        Raises:
            Desync: `calls` says what each rank called.
        """
        mine, said = self._mine[:_SITE_AT], self._fingerprint
        same = all(bytes(self._in[r][:_SITE_AT]) == mine for r in self._peers)
        if same and not (said.own or said.expected or said.sends):
            return
        headers = [bytes(self._in[r][:_INLINE_AT]) for r in range(self._size)]
        headers[self._rank] = self._mine
        prints = [Fingerprint.unpack(header, _SEQ.size) for header in headers]
        problem = compare(prints)
        if len({header[: _SEQ.size] for header in headers}) > 1:
            problem = problem or "the ranks are at different operations"
        if problem:
            texts = {
                r: _text(header, f)
                for r, (header, f) in enumerate(zip(headers, prints, strict=True))
            }
            raise AbortRecord.desync(problem, texts).error()

    def copy_back(self, takes: Sequence[Piece]) -> None:
        """Copy what came with the headers to its place."""
        for r in self._peers:
            address, nbytes = takes[r]
            if 0 < nbytes <= INLINE and address != self.inline_address(r):
                there = memoryview(self._mpi.memory.fromaddress(address, nbytes))
                there[:] = self._in[r][_INLINE_AT : _INLINE_AT + nbytes]

    def inline_address(self, rank: int) -> int:
        """Return where the bytes are that came with the header of `rank`."""
        return self._in_address + rank * HEADER + _INLINE_AT


def _text(header: bytes, fingerprint: Fingerprint) -> str:
    """Say a header in words."""
    (seq,) = _SEQ.unpack_from(header)
    site = header[_SITE_AT:].rstrip(b"\0").decode(errors="replace")
    return f"#{seq} {fingerprint.text(site)}"
