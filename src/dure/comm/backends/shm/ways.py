"""Which way an operation takes through shared memory, in words, for the log.

The engine chooses (csrc/core: `Channel::reduce`, `Channel::move`, rendezvous.cpp); here its choice
is described from what this rank knows. Ways that depend on the memory of all ranks say so.
"""

from __future__ import annotations

from dure.comm.backends.shm.copying import CopyPlan
from dure.comm.call import Call
from dure.comm.memory import heap_address
from dure.trace.record import MESSAGES

__all__ = ["INLINE_BYTES", "SMALL_BYTES", "way"]

INLINE_BYTES = 32
"""`kInlineBytes` of the engine."""
SMALL_BYTES = 16 << 10
"""`kOneShotBytes` and `kZeroCopyBytes` of the engine."""


def way(call: Call, size: int, copies: CopyPlan) -> str:
    """Return how the engine does `call` in a group of `size` ranks."""
    data = call.data
    nbytes = 0 if data is None else data.nbytes
    from_heap = data is not None and nbytes >= SMALL_BYTES and heap_address(data) is not None
    if data is None or nbytes == 0:
        return "one barrier"
    if size == 1:
        return "nothing to exchange"
    if call.op in MESSAGES:
        if from_heap:
            return "from the symmetric heap"
        return _once_or_staged(nbytes, copies.message_bytes, "through the ring")
    if call.kind in {"all_reduce", "reduce"}:
        return _reduction(call, nbytes, size, from_heap)
    if nbytes <= INLINE_BYTES:
        return "inline"
    if from_heap and call.kind != "scatter":
        return "zero-copy, if the tensors of all ranks are in symmetric heaps"
    if call.kind == "reduce_scatter":
        return "through staging"
    shared = call.kind in {"broadcast", "all_gather"}
    least = copies.shared_bytes if shared else copies.block_bytes
    own_parts = call.kind in {"scatter", "all_to_all"}
    return _once_or_staged(nbytes // size if own_parts else nbytes, least, "through staging")


def _reduction(call: Call, nbytes: int, size: int, from_heap: bool) -> str:
    if nbytes <= INLINE_BYTES:
        return "inline"
    if nbytes <= SMALL_BYTES:
        return "one-shot"
    staged = "pairwise exchange" if size == 2 else "two-shot"
    if from_heap and call.kind == "all_reduce":
        return f"direct, if the tensors of all ranks are in symmetric heaps, else {staged}"
    return staged


def _once_or_staged(nbytes: int, least: int | None, staged: str) -> str:
    return staged if least is None or nbytes < least else "copied once by the kernel"
