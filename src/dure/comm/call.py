"""`Call`: an operation of one rank, as one value for all backends.

A call has the operation and its tensors. Backends run it (`backends.base.Backend.run`), and before
data move the ranks compare a function of it: the `Fingerprint`.

**Operations.** Those with one tensor for all ranks end in ``_single``; the others have one tensor
for each rank. Ranks may use both forms of one operation together (all_to_all_single with split
sizes becomes all_to_all), so their common name is compared (`Call.kind`).

| operation                  | inputs                       | outputs                      | root |
|----------------------------|------------------------------|------------------------------|------|
| all_reduce, reduce         | the tensor                   | the same                     | dst  |
| broadcast                  | the tensor                   | the same                     | src  |
| all_gather                 | the tensor                   | one per rank                 |      |
| all_gather_single          | the tensor [k]               | one [n*k]                    |      |
| gather                     | the tensor                   | on the root: one per rank    | dst  |
| scatter                    | on the root: one per rank    | the tensor                   | src  |
| reduce_scatter, all_to_all | one per rank                 | the tensor; one per rank     |      |
| the same, _single          | one [n*k]                    | one [k]; one [n*k]           |      |
| barrier, new_group         |                              |                              |      |

**Fingerprints.** Lengths that all ranks know must be equal: one number represents them (`equal`).
Other lengths are known only to some ranks. A root's expected counts of all ranks are a digest
(`expected`), which is compared with the ranks' `own` counts. The n x n lengths of an all_to_all
agree if the sum of mix(i, j, length) is the same over all that is sent (`sends`) and all that is
received (`takes`). So a fingerprint has a fixed size for any number of tensors, and each rank that
has the fingerprints of all ranks comes to the same result.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from dure import native
from dure.comm.codes import dtype_code, dtype_name
from dure.comm.ops import REDUCTIONS, ReduceOp
from dure.errors import DeviceError
from dure.trace import ring

_KINDS = (
    *("none", "barrier", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter"),
    *("reduce_scatter", "all_to_all", "host_shared_empty", "new_group"),
)
KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
"""Those of csrc/core/types.h, as far as the engine has them."""
_MASK = (1 << 64) - 1
NOTHING = native.Subject(0, "")
_AT_ROOT = frozenset({"gather", "scatter"})
_OUTPUT_SAYS = frozenset({"reduce_scatter", "scatter", "recv", "irecv"})


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The call of one rank (see the module's text).

    Attributes:
        op: The operation's public name.
        inputs: The tensors that this rank sends.
        outputs: The tensors that it writes.
        reduction: The reduction, if any.
        root: `src` or `dst` of a collective; -1 if there is none.
        peer: The other end of a message; None for any rank, and for collectives.
        tag: Of a message.
        nbytes: Of an allocation; for new_group a code of the members (`members_code`).
        channel: The group's channel that runs it.
        subject: The object that it belongs to, if set (`about`).

    Obtained from:
        Dure makes them; `Backend.run` receives them.
    """

    op: str
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    reduction: ReduceOp | None = None
    root: int = -1
    peer: int | None = None
    tag: int = 0
    nbytes: int = 0
    channel: int = 0
    subject: native.Subject = NOTHING

    @property
    def kind(self) -> str:
        """The operation, whichever form it was called in."""
        return self.op.removesuffix("_single")

    @property
    def single(self) -> bool:
        """Whether one tensor has the parts of all ranks, which split sizes have not cut."""
        return self.op.endswith("_single") and len(self.inputs) == len(self.outputs) == 1

    @property
    def other_end(self) -> int | None:
        """The root of a collective, or the other end of a message."""
        return self.root if self.root >= 0 else self.peer

    @property
    def data(self) -> torch.Tensor | None:
        """The tensor to report for the call: this rank's input, if it has one."""
        tensors = self.outputs if self.op in _OUTPUT_SAYS else self.inputs
        return tensors[0] if tensors else None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the tensors, if there are any."""
        tensors = self.inputs or self.outputs
        return tensors[0].dtype if tensors else None

    @property
    def needed_reduction(self) -> ReduceOp:
        """The reduction of a call that has one."""
        assert self.reduction is not None
        return self.reduction

    def gives(self, n: int) -> Sequence[torch.Tensor]:
        """Return the tensors that this rank sends to each of `n` ranks."""
        return self._of_each(self.inputs, n, self.op == "gather")

    def takes(self, n: int) -> Sequence[torch.Tensor]:
        """Return the tensors into which this rank receives from each of `n` ranks."""
        return self._of_each(self.outputs, n, self.op == "scatter")

    def _of_each(
        self, tensors: Sequence[torch.Tensor], n: int, root_only: bool
    ) -> Sequence[torch.Tensor]:
        """Return one tensor for each rank; empty ones if only the root sends or receives."""
        if self.op not in _AT_ROOT:
            return even_parts(tensors[0], n) if self.single else tensors
        nothing = (self.inputs or self.outputs)[0].new_empty(0)
        if root_only:
            return [tensors[0] if rank == self.root else nothing for rank in range(n)]
        return tensors or [nothing] * n


def even_parts(tensor: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Cut a contiguous tensor [*] into `n` flat parts of one length."""
    flat = tensor.detach().view(-1)
    k = flat.numel() // n
    return [flat[i * k : (i + 1) * k] for i in range(n)]


_DIGEST = 1 << 63


def members_code(rank_lists: Sequence[Sequence[int]]) -> int:
    """Return 64 bits for the ranks of groups: a bit per rank for one group, else a digest."""
    if len(rank_lists) == 1 and max(rank_lists[0]) < 63:
        return sum(1 << rank for rank in rank_lists[0])
    text = repr([list(ranks) for ranks in rank_lists]).encode()
    return _DIGEST | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % _DIGEST


def _members_text(code: int) -> str:
    """Return the members as text, as the engine does (csrc/core/fingerprint.cpp)."""
    if code & _DIGEST:
        return f"ranks #{code % _DIGEST:x}"
    return str([rank for rank in range(63) if code >> rank & 1])


# ---- comparing calls -----------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """A call as numbers, which all ranks compare.

    Attributes:
        kind: The operation's code.
        dtype: The dtype's code; -1 if there are no tensors.
        reduction: The reduction's code; -1 if there is none.
        root: The root; -1 if there is none.
        numel: Elements of this rank's input, for messages.
        equal: 64 bits for all lengths that must be equal on all ranks.
        own: Elements of this rank, if they may differ from others'.
        expected: Digest of all ranks' counts, from a root that knows them.
        sends: Sum of `_mix` of the lengths that this rank sends to each rank.
        takes: Sum of `_mix` of the lengths that this rank receives from each rank.
        subject: Code of the call's subject; 0 if none is set.
    """

    kind: int
    dtype: int = -1
    reduction: int = -1
    root: int = -1
    numel: int = 0
    equal: int = 0
    own: int = 0
    expected: int = 0
    sends: int = 0
    takes: int = 0
    subject: int = 0

    def pack(self) -> bytes:
        """Return it as `SIZE` bytes."""
        return _FORMAT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview, at: int = 0) -> Fingerprint:
        """Decode the bytes that `pack` made."""
        return cls(*_FORMAT.unpack_from(data, at))

    def text(self, site: str = "") -> str:
        """Return the call as text, with its line of the program."""
        parts: list[str] = []
        if _KINDS[self.kind] == "new_group":
            parts.append(_members_text(self.numel))
        if self.dtype >= 0:
            parts.append(f"{dtype_name(self.dtype)}[{self.numel}]")
        if self.reduction >= 0:
            parts.append(REDUCTIONS[self.reduction])
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return f"{_KINDS[self.kind]}({', '.join(parts)})" + (f" at {site}" if site else "")


_FORMAT = struct.Struct("<bhbxi6QI")
SIZE = _FORMAT.size
"""Bytes of a packed fingerprint."""


def fingerprint(call: Call, rank: int, size: int) -> Fingerprint:
    """Return the fingerprint of a `call` of `rank`.

    Cost:
        Some microseconds, and a hash of the lengths if there is one per rank.
    """
    kind, dtype, reduction = call.kind, call.dtype, call.reduction
    tensors = call.inputs or call.outputs
    numel = tensors[0].numel() if tensors else call.nbytes
    equal = own = expected = sends = takes = 0
    if kind == "all_to_all" and not call.single:
        numel = sum(t.numel() for t in tensors)
        sends = sum(_mix(rank, r, t.numel()) for r, t in enumerate(call.inputs)) & _MASK
        takes = sum(_mix(r, rank, t.numel()) for r, t in enumerate(call.outputs)) & _MASK
    elif kind == "all_gather":
        equal = _digest_even(numel, size) if call.single else _digest(call.outputs)
    elif kind == "reduce_scatter":
        equal = _digest_even(numel // size, size) if call.single else _digest(call.inputs)
        numel = numel if call.single else sum(t.numel() for t in tensors)
    elif kind == "gather":
        own, expected = numel, _digest(call.outputs) if call.outputs else 0
    elif kind == "scatter":
        own = call.outputs[0].numel()
        expected = _digest(call.inputs) if call.inputs else 0
    else:
        equal = numel
    return Fingerprint(
        KIND_CODES[kind],
        -1 if dtype is None else dtype_code(dtype),
        -1 if reduction is None else reduction.code,
        call.root,
        numel,
        equal,
        own,
        expected,
        sends,
        takes,
        call.subject.code,
    )


_FIELDS = (
    *(("kind", "operation"), ("root", "root"), ("reduction", "reduction"), ("dtype", "dtype")),
    *(("equal", "lengths"), ("subject", "tensor that is meant")),
)


def compare(fingerprints: Sequence[Fingerprint]) -> str:
    """Compare the calls of all ranks; return the difference, or "" if they match."""
    first = fingerprints[0]
    if _KINDS[first.kind] == "all_to_all":
        fingerprints = _in_one_form(fingerprints)
        first = fingerprints[0]
    for r, other in enumerate(fingerprints):
        unlike = (name for key, name in _FIELDS if getattr(other, key) != getattr(first, key))
        if what := next(unlike, ""):
            return f"rank 0 and rank {r} differ in the {what}"
    expected = {f.expected for f in fingerprints if f.expected}
    if expected and expected != {_digest_of([f.own for f in fingerprints])}:
        return "the root expects other lengths than the ranks have"
    if (sum(f.sends for f in fingerprints) - sum(f.takes for f in fingerprints)) & _MASK:
        return "the ranks send each other other lengths than they expect"
    return ""


def _in_one_form(fingerprints: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Add the sums to calls of all_to_all_single if a rank calls all_to_all."""
    even = [not (f.sends or f.takes) for f in fingerprints]
    if all(even):
        return list(fingerprints)
    n = len(fingerprints)

    def summed(r: int, f: Fingerprint) -> Fingerprint:
        k = f.equal // n
        sends, takes = sum(_mix(r, j, k) for j in range(n)), sum(_mix(j, r, k) for j in range(n))
        return f._replace(equal=0, sends=sends & _MASK, takes=takes & _MASK)

    return [summed(r, f) if even[r] else f for r, f in enumerate(fingerprints)]


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    return _digest_of([t.numel() for t in tensors])


def _digest_of(counts: Sequence[int]) -> int:
    """Return 64 bits, not 0, that are equal for equal counts."""
    if len(set(counts)) == 1:
        return _digest_even(counts[0], len(counts))
    packed = struct.pack(f"<{len(counts)}Q", *counts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") | 1


def _digest_even(count: int, n: int) -> int:
    """Return the digest of `n` equal counts, which is cheap to make."""
    return (_mix(count, n, 0) | 1) & _MASK


def _mix(sender: int, receiver: int, length: int) -> int:
    """Return 64 bits for one length of an all_to_all."""
    x = (sender * 0x9E3779B97F4A7C15 + receiver * 0xC2B2AE3D27D4EB4F + length + 1) & _MASK
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def call_site() -> str:
    """Return the line of the program that made the current call: "FILE:LINE ..."."""
    return native.call_site() or ring.call_site()


def place_of(call: Call) -> str:
    """Return the line of the program that makes a call, and the call's subject."""
    about = call.subject.text
    return f"{call_site()}, of {about}" if about else call_site()


Subject = native.Subject


def subject_of(text: str) -> Subject:
    """Return the subject of this text, for `about`; it is kept as long as the process."""
    return native.Subject(zlib.crc32(text.encode()) % (1 << 30) or 1, text)


about = native.set_subject
"""Set the subject of this thread's collectives, until the next call; `NOTHING` ends it.

All ranks must set the same subject: otherwise they raise `Desync` at their next collective.
"""


def check_one_device(tensors: Sequence[torch.Tensor], op: str) -> None:
    """Raise unless all tensors of a call are on one device."""
    devices = dict.fromkeys(t.device for t in tensors)
    if len(devices) > 1:
        raise DeviceError(
            "the tensors of one call must be on one device",
            op=op,
            seen=f"they are on {', '.join(map(str, devices))}",
            fix="Move them with .to(...).",
        )
