"""Headers: descriptions of a call, of fixed length, which ranks compare before data move.

Backends that compare calls exchange headers in different ways: over the engine (`verify`), by
messages (`mpi`), in shared memory and between hosts (`hybrid`), or as objects (`threads`). Each
rank has the headers of all ranks before data are written, so all find the same difference.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from dure.comm.backends.abort import AbortRecord
from dure.comm.call import SIZE, Fingerprint, compare

__all__ = ["CALL_BYTES", "HEADER_BYTES", "Header", "difference"]

HEADER_BYTES = 256

_SEQ = struct.Struct("<Q")
CALL_BYTES = _SEQ.size + SIZE
"""The first bytes, without the line of the program, which may differ between equal calls."""

_SITE_BYTES = HEADER_BYTES - CALL_BYTES


class Header(NamedTuple):
    """The call of one rank.

    Attributes:
        fingerprint: The call.
        site: Line of the program that made it.
        seq: Its number among the group's collectives; 0 if the backend does not number them.
        data: The data sent with the header, if any.
    """

    fingerprint: Fingerprint
    site: str
    seq: int = 0
    data: bytes | None = None

    def pack(self) -> bytes:
        """Return it as `HEADER_BYTES` bytes, without the data."""
        site = self.site.encode()[-_SITE_BYTES:]
        return _SEQ.pack(self.seq) + self.fingerprint.pack() + site.ljust(_SITE_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes | bytearray | memoryview, data: bytes | None = None) -> Header:
        """Decode the bytes that `pack` made."""
        (seq,) = _SEQ.unpack_from(packed)
        site = bytes(packed[CALL_BYTES:HEADER_BYTES]).rstrip(b"\0")
        fingerprint = Fingerprint.unpack(packed, _SEQ.size)
        return cls(fingerprint, site.decode(errors="replace"), seq, data)

    def text(self) -> str:
        """Return the call as text, with its line of the program."""
        return self.fingerprint.text(self.site)


def difference(headers: Sequence[Header]) -> AbortRecord | None:
    """Compare the headers of all ranks; return the record that breaks the group if they differ."""
    problem = compare([header.fingerprint for header in headers])
    if not problem and len({header.seq for header in headers}) > 1:
        problem = "the ranks are at different operations"
    if not problem:
        return None
    return AbortRecord.desync(problem, {r: header.text() for r, header in enumerate(headers)})
