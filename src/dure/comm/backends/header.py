"""Headers: what a rank tells the others of a call before data move, in bytes of one length.

Backends that compare calls exchange headers, each in its own way: over the engine (`verify`), by
messages (`mpi`), in shared memory and between hosts (`hybrid`), or as objects (`threads`). All
ranks have those of all before data are touched, so all find the same difference.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from dure.comm.backends.abort import AbortRecord
from dure.comm.call import SIZE, Fingerprint, compare

__all__ = ["CALL_BYTES", "HEADER_BYTES", "Header", "difference"]

HEADER_BYTES = 256
"""Of a packed header."""

_SEQ = struct.Struct("<Q")
CALL_BYTES = _SEQ.size + SIZE
"""Its first bytes: all but the line of the program, which may differ where calls are equal."""

_SITE_BYTES = HEADER_BYTES - CALL_BYTES


class Header(NamedTuple):
    """What one rank calls.

    Attributes:
        fingerprint: The call.
        site: Where in the program it was made.
        seq: As which collective of the group; 0 where they need no numbers.
        data: What travelled with it, if anything did.
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
        """Read what `pack` has made."""
        (seq,) = _SEQ.unpack_from(packed)
        site = bytes(packed[CALL_BYTES:HEADER_BYTES]).rstrip(b"\0")
        fingerprint = Fingerprint.unpack(packed, _SEQ.size)
        return cls(fingerprint, site.decode(errors="replace"), seq, data)

    def text(self) -> str:
        """Say it in words."""
        return self.fingerprint.text(self.site)


def difference(headers: Sequence[Header]) -> AbortRecord | None:
    """Compare the headers of all ranks; return what breaks the group where they differ."""
    problem = compare([header.fingerprint for header in headers])
    if not problem and len({header.seq for header in headers}) > 1:
        problem = "the ranks are at different operations"
    if not problem:
        return None
    return AbortRecord.desync(problem, {r: header.text() for r, header in enumerate(headers)})
