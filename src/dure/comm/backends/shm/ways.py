"""How an operation runs in shared memory, as text for the log.

The engine chooses (csrc/core: `Channel::reduce`, `Channel::move`, rendezvous.cpp); this module
describes its choice as far as one rank knows it.
"""

from __future__ import annotations

from dure.comm.backends.shm.copying import CopyPlan, single_copies_wanted
from dure.comm.call import Call
from dure.comm.memory import heap_address
from dure.trace.record import MESSAGES

__all__ = ["INLINE_BYTES", "SMALL_BYTES", "way"]

INLINE_BYTES = 32
"""`kInlineBytes` of the engine."""
SMALL_BYTES = 16 << 10
"""`kOneShotBytes` and `kZeroCopyBytes` of the engine."""


_TO_EACH = frozenset({"scatter", "all_to_all", "reduce_scatter"})
"""Operations in which a rank sends another block to each rank."""
_ALL_IN_ONE = frozenset({"all_to_all_single", "reduce_scatter_single"})
"""Operations whose `Call.data` is one tensor with the blocks for all ranks."""


def way(call: Call, size: int, copies: CopyPlan) -> str:
    """Return how the engine runs `call` in a group of `size` ranks."""
    data, kind = call.data, call.kind
    nbytes = 0 if data is None else data.nbytes
    if data is None or nbytes == 0:
        return "one barrier"
    if size == 1:
        return "nothing to exchange"
    if call.op in MESSAGES:
        if nbytes >= SMALL_BYTES and heap_address(data) is not None:
            return "from the symmetric heap"
        return _once_or_staged(nbytes, copies.message_bytes, "through the ring")
    if kind in {"all_reduce", "reduce"}:
        from_heap = nbytes > SMALL_BYTES and heap_address(data) is not None
        return _reduction(call, nbytes, size, from_heap)
    block = nbytes // size if call.op in _ALL_IN_ONE else nbytes
    if block <= INLINE_BYTES and (kind not in _TO_EACH or size == 2):
        return "inline"
    if kind != "scatter" and _sent_from_heap(call):
        return "zero-copy, if the tensors of all ranks are in symmetric heaps"
    if kind == "reduce_scatter":
        return "through staging"
    least = copies.shared_bytes if kind not in _TO_EACH else copies.block_bytes
    if kind == "broadcast" and size == 2:
        least = copies.message_bytes
    chosen = _once_or_staged(block, least, "through staging")
    if chosen != "through staging" and single_copies_wanted() < 0:
        chosen += ", or through staging if the ranks' caches cannot hold the data"
    return chosen


def _sent_from_heap(call: Call) -> bool:
    """Return whether this rank sends one range of a symmetric heap, and not a small one."""
    sent = call.inputs or call.outputs
    places = [heap_address(tensor) for tensor in sent]
    nbytes = sum(tensor.nbytes for tensor in sent)
    if nbytes < SMALL_BYTES or None in places or len({tensor.nbytes for tensor in sent}) > 1:
        return False
    starts = [tensor.data_ptr() for tensor in sent]
    return starts == [starts[0] + i * sent[0].nbytes for i in range(len(starts))]


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
