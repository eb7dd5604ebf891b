"""`Call`: what one rank asks of its group, as one value for all backends.

A call names its operation and its tensors and nothing of how it is done. Backends run it
(`backends.base.Backend.run`), and what ranks compare before data move is a function of it: the
`Fingerprint`.

**Operations.** Those of one tensor for all ranks end in ``_single``; the others take one tensor a
rank. Both forms of one operation may meet (a rank that gives split sizes to all_to_all_single
calls all_to_all), so comparing looks at their common name (`Call.kind`).

| operation                  | inputs                       | outputs                      | root |
|----------------------------|------------------------------|------------------------------|------|
| all_reduce, reduce         | the tensor                   | the same                     | dst  |
| broadcast                  | the tensor                   | the same                     | src  |
| all_gather                 | the tensor                   | one a rank                   |      |
| all_gather_single          | the tensor [k]               | one [n*k]                    |      |
| gather                     | the tensor                   | on the root: one a rank      | dst  |
| scatter                    | on the root: one a rank      | the tensor                   | src  |
| reduce_scatter, all_to_all | one a rank                   | the tensor; one a rank       |      |
| the same, _single          | one [n*k]                    | one [k]; one [n*k]           |      |
| barrier, new_group         |                              |                              |      |

**Fingerprints.** Some lengths all ranks know, and these must be equal: one number stands for them
(`equal`). Others only their owner knows. A root's expectation of everybody's count is a digest
(`expected`, of the ranks' `own`). The n x n lengths of an all_to_all agree if the sum of mix(i,
j, length) is the same over all that is sent (`sends`) and over all that is to be received
(`takes`). So a fingerprint has a fixed size however many tensors there are, and whoever has those
of all ranks finds what all others find.
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
    """What one rank calls (see the module's text).

    Attributes:
        op: The operation, as users know it.
        inputs: What this rank gives.
        outputs: Where its results go.
        reduction: How it reduces, if it does.
        root: `src` or `dst` of a collective; -1 where there is none.
        peer: The other end of a message; None for anyone, and for collectives.
        tag: Of a message.
        nbytes: Of an allocation; of new_group, who is in it (`members_code`).
        channel: Which of the group's channels carries it.
        subject: What it is about, where the program says (`about`).
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
        """Whether one tensor stands for one a rank; not so where split sizes have cut it."""
        return self.op.endswith("_single") and len(self.inputs) == len(self.outputs) == 1

    @property
    def data(self) -> torch.Tensor | None:
        """The tensor that says most about the call: this rank's input, where it has one."""
        tensors = self.outputs if self.op in _OUTPUT_SAYS else self.inputs
        return tensors[0] if tensors else None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the tensors, if there are any."""
        tensors = self.inputs or self.outputs
        return tensors[0].dtype if tensors else None

    @property
    def needed_reduction(self) -> ReduceOp:
        """How it reduces; it must."""
        assert self.reduction is not None
        return self.reduction

    def gives(self, n: int) -> Sequence[torch.Tensor]:
        """Return what this rank gives to each of `n` ranks, where it gives each its own."""
        return self._of_each(self.inputs, n, self.op == "gather")

    def takes(self, n: int) -> Sequence[torch.Tensor]:
        """Return where goes what this rank takes from each of `n` ranks."""
        return self._of_each(self.outputs, n, self.op == "scatter")

    def _of_each(
        self, tensors: Sequence[torch.Tensor], n: int, root_only: bool
    ) -> Sequence[torch.Tensor]:
        """Return one tensor a rank; a root's operation has empty ones for the other ranks."""
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
    """Return 64 bits for the ranks of groups: a bit a rank for one group, else a digest."""
    if len(rank_lists) == 1 and max(rank_lists[0]) < 63:
        return sum(1 << rank for rank in rank_lists[0])
    text = repr([list(ranks) for ranks in rank_lists]).encode()
    return _DIGEST | int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % _DIGEST


def _members_text(code: int) -> str:
    """Say the members; as the engine does (csrc/core/fingerprint.cpp)."""
    if code & _DIGEST:
        return f"ranks #{code % _DIGEST:x}"
    return str([rank for rank in range(63) if code >> rank & 1])


# ---- comparing calls -----------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """A call as the other ranks are told of it; all numbers, of a fixed size.

    Attributes:
        kind: The operation's code.
        dtype: The dtype's code; -1 where there are no tensors.
        reduction: The reduction's code; -1 where there is none.
        root: The root; -1 where there is none.
        numel: Elements of this rank's input, for people.
        equal: 64 bits for all lengths that must be equal on all ranks.
        own: Elements of this rank, where they may differ from others'.
        expected: Digest of all ranks' counts, from a root that knows them.
        sends: Sum of `_mix` of what this rank sends to each.
        takes: Sum of `_mix` of what this rank is to receive from each.
        subject: Code of what it is about; 0 where nothing is said.
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
        """Read it from where `pack` has put it."""
        return cls(*_FORMAT.unpack_from(data, at))

    def text(self, site: str = "") -> str:
        """Say the call in words, and where the program made it."""
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
    """Return what all ranks are told of the `call` of `rank`.

    Cost: some microseconds, and a hash of the lengths where there is one a rank.
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
    """Compare what all ranks call; return what differs, or "" where all fits together."""
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
    """Give those of all_to_all_single their sums, if a rank calls all_to_all."""
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
    """Return 64 bits that stand for one length of an all_to_all."""
    x = (sender * 0x9E3779B97F4A7C15 + receiver * 0xC2B2AE3D27D4EB4F + length + 1) & _MASK
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def call_site() -> str:
    """Return where in the user's program the current call was made: "FILE:LINE ..."."""
    return native.call_site() or ring.call_site()


def place_of(call: Call) -> str:
    """Return where a call is made, now, and what it is about."""
    about = call.subject.text
    return f"{call_site()}, of {about}" if about else call_site()


Subject = native.Subject


def subject_of(text: str) -> Subject:
    """Return what calls are about, for `about`; it is kept as long as the process."""
    return native.Subject(zlib.crc32(text.encode()) % (1 << 30) or 1, text)


about = native.set_subject
"""Say what this thread's collectives are about until it says something else, in the end `NOTHING`.

All ranks must say the same: ranks that do not find a `Desync` at their first collective, at no
further communication.
"""
