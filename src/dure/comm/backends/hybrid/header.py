"""The header exchange: how every collective of a hybrid group begins.

A rank puts its call's fingerprint (comm/call.py), where the program made the call, and, where the
operation is small, its data into a *header* of fixed length. The ranks of a host exchange headers
in shared memory; the leaders exchange those of their hosts by one all_gather of the engine; each
leader shows its host the headers of all. So whatever the ranks call, the engine always does the
same thing in the same order, and a difference is found on all ranks, by all of them, with
everybody's call in hand and before the engine has moved a byte of user data.

*Small* operations are over then: every rank has the data of all. *Large* ones use the time while
the leaders' headers travel for their first step in shared memory (`begin`, then `settle`).

Cost: two operations in shared memory and one all_gather of m headers between H leaders, where m is
the most ranks a host has; a header has some 240 bytes and room for data: 64 to 1024 bytes, less the
more ranks there are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.comm.backends.abort import AbortRecord
from dure.comm.backends.hybrid.subcomms import SubComms
from dure.comm.backends.request import Request
from dure.comm.call import SIZE, Call, Fingerprint, compare

__all__ = ["Header", "HeaderExchange"]

_PREFIX = struct.Struct("<QHH")
_PRINT_AT = _PREFIX.size
_SITE_AT = _PRINT_AT + SIZE
_SITE_BYTES = 160
_FIXED = (_SITE_AT + _SITE_BYTES + 7) // 8 * 8
_ALL_DATA = 32 * 1024
_ABSENT = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Header:
    """What one rank called: as which operation of the group, from where, and its data if small."""

    fingerprint: Fingerprint
    site: str
    seq: int = 0
    data: bytes | None = None


class HeaderExchange:
    """The header exchanges of one group, one after another. Threads: one at a time.

    Args:
        comms: The group's sub-communicators.
    """

    def __init__(self, comms: SubComms) -> None:
        self._comms, hosts = comms, comms.hosts
        size, widest = hosts.size, max(map(len, hosts.ranks))
        self.room = max(64, min(1024, _ALL_DATA // size // 8 * 8))
        """Bytes of data that fit into a header."""
        self._length = _FIXED + self.room
        self.begun = 0
        """How many operations this rank has begun."""
        self.opened = 0
        """How many operations all ranks of this host have begun."""
        self._mine = bytearray(self._length)
        self._all = bytearray(len(hosts.ranks) * widest * self._length)
        self._stride = widest * self._length
        self._mine_wire = torch.frombuffer(self._mine, dtype=torch.uint8)
        self._all_wire = torch.frombuffer(self._all, dtype=torch.uint8)
        self._host = bytearray(self._stride)
        self._host_wire = torch.frombuffer(self._host, dtype=torch.uint8)
        here = self._host_wire[: len(hosts.mine) * self._length]
        mine, host, everything = (self._mine_wire,), (self._host_wire,), (self._all_wire,)
        self._show_host = Call(op="all_gather_single", inputs=mine, outputs=(here,))
        self._show_hosts = Call(op="all_gather_single", inputs=host, outputs=everything)
        self._show_all = Call(op="broadcast", inputs=everything, outputs=everything, root=0)
        self._request: Request | None = None
        self._op, self._settled = "", True

    def run(
        self, op: str, header: Header, data: Sequence[torch.Tensor] | None = None
    ) -> list[Header]:
        """Exchange headers; return those of all ranks.

        Args:
            op: The operation, for errors.
            header: What is called.
            data: To go with it, at most `room` bytes; None if this rank has none to show.

        Raises:
            Desync: The calls differ.
        """
        self._send(op, header, data)
        return self._collect()

    def begin(self, op: str, header: Header) -> None:
        """Show this rank's call to its host, and send the host's calls on their way.

        The ranks of the host may go on with shared memory: their calls are equal.
        """
        self._send(op, header, None)
        self._settled = False
        mine = self._mine[_PRINT_AT:_SITE_AT]
        for i in range(len(self._comms.hosts.mine)):
            at = i * self._length
            if self._host[at + _PRINT_AT : at + _SITE_AT] != mine:
                self.settle()  # which raises

    def settle(self) -> None:
        """Wait for the calls of all ranks and compare them, unless that has been done.

        Raises:
            Desync: They differ.
        """
        if not self._settled:
            self._settled = True
            self._collect()

    def _collect(self) -> list[Header]:
        comms = self._comms
        if comms.hosts.is_leader:
            comms.wait(self._request, self._op)
            self._request = None
        comms.local.run(self._show_all, False)
        places = comms.hosts.places
        headers = [self._unpack(host * self._stride + i * self._length) for host, i in places]
        self._compare(headers)
        return headers

    def _send(self, op: str, header: Header, data: Sequence[torch.Tensor] | None) -> None:
        comms = self._comms
        self._op = op
        self.begun += 1
        self._pack(header, data)
        comms.local.run(self._show_host, False)
        self.opened = self.begun
        if comms.hosts.is_leader and comms.rail is not None:
            self._request = comms.rail.run(self._show_hosts, True)

    def _pack(self, header: Header, data: Sequence[torch.Tensor] | None) -> None:
        site = header.site.encode()[-_SITE_BYTES:]
        length = _ABSENT if data is None else sum(t.nbytes for t in data)
        _PREFIX.pack_into(self._mine, 0, self.begun, length, len(site))
        self._mine[_PRINT_AT:_SITE_AT] = header.fingerprint.pack()
        self._mine[_SITE_AT : _SITE_AT + len(site)] = site
        at = _FIXED
        for t in data or ():
            if t.nbytes:
                flat = t.detach().reshape(-1).view(torch.uint8)
                self._mine_wire[at : at + len(flat)] = flat
                at += len(flat)

    def _unpack(self, at: int) -> Header:
        seq, length, site = _PREFIX.unpack_from(self._all, at)
        start = at + _SITE_AT
        text = self._all[start : start + site].decode(errors="replace")
        data = None
        if length != _ABSENT:
            data = bytes(self._all[at + _FIXED : at + _FIXED + length])
        return Header(Fingerprint.unpack(self._all, at + _PRINT_AT), text, seq, data)

    def _compare(self, headers: Sequence[Header]) -> None:
        problem = compare([h.fingerprint for h in headers])
        if len({h.seq for h in headers}) > 1:
            problem = problem or "the ranks are at different operations"
        if problem:
            texts = {r: h.fingerprint.text(h.site) for r, h in enumerate(headers)}
            self._comms.state.settle(AbortRecord.desync(problem, texts))
            self._comms.state.check(self._op)
