"""Opening: how every collective of a hybrid group begins.

A rank describes its call in a *frame* of fixed length: number, digest of what must be equal on all
ranks, counts, the call in words, and, where the operation is small, its data. The ranks of a host
exchange frames in shared memory; the leaders exchange those of their hosts by one all_gather of the
engine; each leader shows its host the frames of all. So whatever the ranks call, the engine always
does the same thing in the same order, and a difference is found on all ranks, by all of them, with
everybody's call in hand and before the engine has moved a byte of user data.

*Small* operations are over then: every rank has the data of all. *Large* ones use the time while
the leaders' frames travel for their first step in shared memory (`begin`, then `settle`).

Lengths that differ by rank are compared by sums. A root's expectation of everybody's count is a
digest in its frame (`expected`). The n x n lengths of an all_to_all agree if the sum of
mix(i, j, length) is the same over all that is sent and over all that is to be received.

Cost: two operations in shared memory and one all_gather of m frames between H leaders, where m is
the most ranks a host has; a frame has 256 bytes and room for data: 64 to 1024 bytes, less the more
ranks there are.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.comm.backends.base import Ticket
from dure.comm.backends.hybrid.fate import Verdict
from dure.comm.backends.hybrid.links import Links
from dure.comm.ops import ReduceOp

__all__ = ["Call", "Frame", "Opening", "digest_of", "mix"]

_HEADER = struct.Struct("<QQQQQQHH")
_TEXT_BYTES = 200
_FIXED = _HEADER.size + _TEXT_BYTES
_ALL_DATA = 32 * 1024
_MASK = (1 << 64) - 1
_ABSENT = (1 << 16) - 1


def digest_of(values: Sequence[object]) -> int:
    """Return 64 bits that are equal for equal values (numbers and strings)."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def mix(sender: int, receiver: int, length: int) -> int:
    """Return 64 bits that stand for one length of an all_to_all."""
    x = (sender * 0x9E3779B97F4A7C15 + receiver * 0xC2B2AE3D27D4EB4F + length + 1) & _MASK
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What this rank calls.

    Attributes:
        op: The operation.
        tensor: Whose dtype and shape say most about the call; None for a barrier.
        reduction: How it reduces, if it does.
        root: The root, if there is one.
        equal: Whatever else must be equal on all ranks; numbers.
        count: Elements of this rank, where they may differ from others'.
        expected: Digest of all ranks' counts, from a root that knows them.
        sends: Sum of `mix` of what this rank sends.
        takes: Sum of `mix` of what this rank is to receive.
    """

    op: str
    tensor: torch.Tensor | None = None
    reduction: ReduceOp | None = None
    root: int = -1
    equal: tuple[int, ...] = ()
    count: int = 0
    expected: int = 0
    sends: int = 0
    takes: int = 0

    def digest(self) -> int:
        """Return what must be the same on all ranks, as 64 bits."""
        dtype = None if self.tensor is None else str(self.tensor.dtype)
        reduction = None if self.reduction is None else self.reduction.name
        return digest_of((self.op, dtype, reduction, self.root, self.equal))

    def text(self) -> str:
        """Say the call in words, and where the program made it."""
        parts: list[str] = []
        if self.tensor is not None:
            dtype = str(self.tensor.dtype).removeprefix("torch.")
            parts.append(f"{dtype}{list(self.tensor.shape)}")
        if self.reduction is not None:
            parts.append(self.reduction.name)
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return f"{self.op}({', '.join(parts)}){_site()}"


def _site() -> str:
    """Return " at FILE:LINE" of the innermost frame that is not ours."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("dure.comm", "threading")):
            return f" at {frame.f_code.co_filename[-80:]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one rank called."""

    seq: int
    digest: int
    count: int
    expected: int
    sends: int
    takes: int
    text: str
    data: bytes | None


class Opening:
    """Opens the operations of one group, one after another. Threads: one at a time.

    Args:
        links: The group's parts.
    """

    def __init__(self, links: Links) -> None:
        self._links, hosts = links, links.hosts
        size, widest = hosts.size, max(map(len, hosts.ranks))
        self.room = max(64, min(1024, _ALL_DATA // size // 8 * 8))
        """Bytes of data that fit into a frame."""
        self._length = _FIXED + self.room
        self.begun = self._seq = 0
        self._mine = bytearray(self._length)
        self._all = bytearray(len(hosts.ranks) * widest * self._length)
        self._stride = widest * self._length
        self._mine_wire = torch.frombuffer(self._mine, dtype=torch.uint8)
        self._all_wire = torch.frombuffer(self._all, dtype=torch.uint8)
        here = len(hosts.mine) * self._length
        self._host = bytearray(self._stride)
        self._host_wire = torch.frombuffer(self._host, dtype=torch.uint8)
        self._here_wire = self._host_wire[:here]
        self._ticket: Ticket | None = None
        self._text = ""
        self._op = ""

    def run(self, call: Call, text: str, data: Sequence[torch.Tensor] | None = None) -> list[Frame]:
        """Begin and settle."""
        self.begin(call, text, data)
        return self.settle()

    def begin(self, call: Call, text: str, data: Sequence[torch.Tensor] | None = None) -> None:
        """Show this rank's call to its host, and send the host's calls on their way.

        Args:
            call: What is called.
            text: The call in words.
            data: To go with it, at most `room` bytes; None if this rank has none to show.
        """
        links = self._links
        self._op = call.op
        self.begun += 1
        self._pack(call, text, data)
        links.local.all_gather_single(self._here_wire, self._mine_wire, False)
        self._seq = self.begun
        if links.hosts.is_leader and links.lane is not None:
            self._ticket = links.lane.all_gather_single(self._all_wire, self._host_wire, True)
        for i in range(len(links.hosts.mine)):
            at = i * self._length
            if self._host[at + 8 : at + 16] != self._mine[8:16]:
                self.settle()  # which raises

    @property
    def opened(self) -> int:
        """How many operations all ranks of this host have begun."""
        return self._seq

    def settle(self) -> list[Frame]:
        """Wait for the calls of all ranks and compare them; return them by rank.

        Raises:
            Desync: They differ.
        """
        links = self._links
        if links.hosts.is_leader:
            links.wait(self._ticket, self._op)
            self._ticket = None
        links.local.broadcast(self._all_wire, 0, False)
        frames: list[Frame] = [None] * links.hosts.size  # pyright: ignore[reportAssignmentType]
        for host, ranks in enumerate(links.hosts.ranks):
            for i, rank in enumerate(ranks):
                frames[rank] = self._unpack(host * self._stride + i * self._length)
        self._compare(frames)
        return frames

    def _pack(self, call: Call, text: str, data: Sequence[torch.Tensor] | None) -> None:
        words = text.encode()[:_TEXT_BYTES]
        length = _ABSENT if data is None else sum(t.nbytes for t in data)
        sums = (call.count, call.expected, call.sends & _MASK, call.takes & _MASK)
        _HEADER.pack_into(self._mine, 0, self.begun, call.digest(), *sums, length, len(words))
        self._mine[_HEADER.size : _HEADER.size + len(words)] = words
        at = _FIXED
        for t in data or ():
            if t.nbytes:
                flat = t.detach().reshape(-1).view(torch.uint8)
                self._mine_wire[at : at + len(flat)] = flat
                at += len(flat)

    def _unpack(self, at: int) -> Frame:
        seq, digest, count, expected, sends, takes, length, words = _HEADER.unpack_from(
            self._all, at
        )
        start = at + _HEADER.size
        text = self._all[start : start + words].decode(errors="replace")
        data = None
        if length != _ABSENT:
            data = bytes(self._all[at + _FIXED : at + _FIXED + length])
        return Frame(seq, digest, count, expected, sends, takes, text, data)

    def _compare(self, frames: Sequence[Frame]) -> None:
        first = frames[0]
        same = all(f.digest == first.digest and f.seq == first.seq for f in frames)
        expected = {f.expected for f in frames if f.expected}
        if same and expected:
            same = expected == {digest_of([f.count for f in frames])}
        if same:
            same = (sum(f.sends for f in frames) - sum(f.takes for f in frames)) & _MASK == 0
        if same:
            return
        calls = {r: f.text for r, f in enumerate(frames)}
        self._links.fate.settle(
            Verdict(
                kind="Desync",
                what="the ranks did not call the same thing",
                calls=calls,
                seen="; ".join(f"rank {r}: {text}" for r, text in calls.items()),
                fix="No data were changed. Make all ranks call the same operations in the same "
                "order.",
            )
        )
        self._links.fate.check(self._op)
