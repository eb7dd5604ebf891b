"""The header exchange: the first step of every collective of a hybrid group.

A rank publishes its *header* (backends/header.py) and, if the operation is small, its data. The
ranks of a host exchange headers in shared memory; the leaders exchange those of their hosts by one
all_gather of the engine; each leader broadcasts the headers of all ranks to its host. So the engine
always runs the same operations in the same order, whatever the ranks call, and all ranks find a
difference before the engine has moved a byte of user data.

*Small* operations are complete then: every rank has the data of all. *Large* ones run their first
step in shared memory while the leaders exchange headers (`begin`, then `settle`).

Cost:
    Two operations in shared memory and one all_gather of m headers between H leaders, where m is
    the largest number of ranks on a host; a header has 264 bytes and room for 64 to 1024 bytes of
    data, less with more ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from dure.comm.backends.header import CALL_BYTES, HEADER_BYTES, Header, difference
from dure.comm.backends.hybrid.subcomms import SubComms
from dure.comm.backends.request import Request
from dure.comm.call import Call

__all__ = ["HeaderExchange"]

_LENGTH = struct.Struct("<Q")
_DATA_AT = HEADER_BYTES + _LENGTH.size
_ALL_DATA = 32 * 1024
_ABSENT = (1 << 64) - 1


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
        self._length = _DATA_AT + self.room
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

    def next(self, op: str, header: Header) -> None:
        """Set this rank's next call; `op` is for errors."""
        self._op, self.begun = op, self.begun + 1
        self._mine[:HEADER_BYTES] = header._replace(seq=self.begun).pack()

    def run(self, data: Sequence[torch.Tensor] | None = None) -> list[Header]:
        """Exchange headers; return those of all ranks.

        Args:
            data: Sent with the header, at most `room` bytes; None if this rank sends none.

        Raises:
            Desync: The calls differ.
        """
        self._send(data)
        return self._collect()

    def begin(self) -> None:
        """Publish this rank's call on its host, and start to send the host's calls.

        Afterwards the ranks of the host may use shared memory: their calls are equal.
        """
        self._send(None)
        self._settled = False
        mine = self._mine[:CALL_BYTES]
        for i in range(len(self._comms.hosts.mine)):
            at = i * self._length
            if self._host[at : at + CALL_BYTES] != mine:
                self.settle()  # this raises

    def settle(self) -> None:
        """Wait for the calls of all ranks and compare them, unless it was done before.

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
        record = difference(headers)
        if record is not None:
            comms.state.settle(record)
            comms.state.check(self._op)
        return headers

    def _send(self, data: Sequence[torch.Tensor] | None) -> None:
        comms, at = self._comms, _DATA_AT
        length = _ABSENT if data is None else sum(t.nbytes for t in data)
        _LENGTH.pack_into(self._mine, HEADER_BYTES, length)
        for t in data or ():
            if t.nbytes:
                flat = t.detach().reshape(-1).view(torch.uint8)
                self._mine_wire[at : at + len(flat)] = flat
                at += len(flat)
        comms.local.run(self._show_host, False)
        self.opened = self.begun
        if comms.hosts.is_leader and comms.rail is not None:
            self._request = comms.rail.run(self._show_hosts, True)

    def _unpack(self, at: int) -> Header:
        (length,) = _LENGTH.unpack_from(self._all, at + HEADER_BYTES)
        begin, data = at + _DATA_AT, None
        if length != _ABSENT:
            data = bytes(self._all[begin : begin + length])
        return Header.unpack(memoryview(self._all)[at : at + HEADER_BYTES], data)
