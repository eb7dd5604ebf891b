"""Hand-over between stages on one host: through slots of the sender's symmetric heap.

The sender copies what it hands over into a *slot*, a piece of its heap, and sends a short message:
where it lies. The receiver maps the slot and computes with it where it is; when the last tensor in
it is freed, it marks the slot as free, and the sender may use it again. So there is one copy, both
ends take the fast path of small messages, and no receive has to be posted. There are as many slots
as transfers are in use at a time, which follows from the schedule; they are kept for the next step.

    slot      word 0: in use | ... 64 bytes | tensor | tensor | ...      each at a multiple of 64
    message   number of the layout (or poison), bytes of its description, pid, start time and heap
              of the sender, offset and length of the slot
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dure.comm import memory as heap
from dure.errors import PeerLost
from dure.parallel.pipeline.layout import PackedPytree, PytreeLayout
from dure.parallel.pipeline.messages import Incoming, StageTransfers
from dure.schedules import Action

__all__ = ["SlotTransfers", "has_slots"]

_LINE = 64
_FREE, _USED = 0, 1
_NOT_COME = -2
"""In a header that is still to be received, in place of a layout's number."""


def has_slots(backend: str, device: torch.device) -> bool:
    """Tell whether ranks of a group reach each other's heaps."""
    return backend == "shm" and device.type == "cpu"


class _Slot:
    """A piece of this rank's heap."""

    def __init__(self, nbytes: int) -> None:
        self.memory = heap.heap_empty(nbytes, dtype=torch.uint8, zeroed=True)
        self.word = self.memory[:4].numpy().view(np.int32)
        address = heap.heap_address(self.memory)
        assert address is not None
        self.place = [*address, nbytes]

    def holds(self, nbytes: int) -> bool:
        """Tell whether it is free, large enough, and not far too large."""
        return self.word[0] == _FREE and nbytes <= len(self.memory) <= 2 * nbytes + 65536


class _PeerSlot:
    """A piece of another rank's heap, which is mapped here."""

    def __init__(self, place: Sequence[int]) -> None:
        pid, start_time, descriptor, offset, nbytes = place
        process = heap.process_of(pid, start_time, descriptor)
        if process is None:
            raise PeerLost("the process that handed a tensor over ended", pid=pid)
        self.process = process
        self.memory = process.memory(offset, nbytes)
        self._bytes: Any = np.frombuffer(self.memory, np.uint8)  # pyright: ignore

    def open(self) -> torch.UntypedStorage:
        """Return what is in it; when that is freed, so is the slot."""
        lent = self._bytes[:]
        end = weakref.finalize(lent, _release, self)
        end.atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8).untyped_storage()


def _release(slot: _PeerSlot) -> None:
    heap.change_word(slot.memory, 0, _USED, _FREE, slot.process, 0.0)


def _offsets(layout: PytreeLayout) -> list[int]:
    """Return where each tensor begins, and where the last one ends."""
    offsets, at = [_LINE], _LINE
    for tensor in layout.tensors:
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        at += math.ceil(nbytes / _LINE) * _LINE
        offsets.append(at)
    return offsets


class SlotTransfers(StageTransfers):
    """The transfers of one rank with ranks of its host; see `StageTransfers`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots: list[_Slot] = []
        self._peer_slots: dict[tuple[int, ...], _PeerSlot] = {}

    def _deliver(self, transfer: Action, number: int, data: bytes, packed: PackedPytree) -> None:
        slot = self._filled(packed)
        self._send_header(transfer, [number, len(data), *slot.place])
        self._send_bytes(data, self._receiver(transfer), self._tag(transfer) + 1)

    def _deliver_poison(self, transfer: Action, data: bytes) -> None:
        self._send_header(transfer, [self.POISON, len(data), 0, 0, 0, 0, 0])
        self._send_bytes(data, self._receiver(transfer), self._tag(transfer) + 1)

    def _send_header(self, transfer: Action, numbers: list[int]) -> None:
        message = torch.tensor(numbers, device="cpu")
        self._group.send(message, self._receiver(transfer), self._tag(transfer))

    def _filled(self, packed: PackedPytree) -> _Slot:
        """Copy tensors into a free slot."""
        *offsets, nbytes = _offsets(packed.layout)
        slot = next((slot for slot in self._slots if slot.holds(nbytes)), None)
        if slot is None:
            slot = _Slot(nbytes)
            self._slots.append(slot)
        storage = slot.memory.untyped_storage()
        for offset, tensor in zip(offsets, packed.tensors, strict=True):
            _placed(storage, offset, tensor.shape, tensor.dtype).copy_(tensor)
        slot.word[0] = _USED
        return slot

    def post(self, transfer: Action) -> None:
        """Note that a transfer will be taken."""
        self._posted[transfer] = Incoming(torch.full((7,), _NOT_COME, device="cpu"))

    def take(self, transfer: Action) -> PackedPytree:
        """See `StageTransfers.take`."""
        header = self._posted[transfer].header
        if header[0] == _NOT_COME:
            self._group.recv(header, self._placement[transfer.stage], self._tag(transfer))
        number, nbytes, *place = header.tolist()
        layout = self._announced_layout(transfer, number, nbytes)
        del self._posted[transfer]
        slot = self._peer_slots.get(tuple(place))
        if slot is None:
            slot = self._peer_slots[tuple(place)] = _PeerSlot(place)
        storage = slot.open()
        *offsets, _ = _offsets(layout)
        return PackedPytree(
            layout,
            [
                _placed(storage, offset, tensor.shape, tensor.dtype)
                for offset, tensor in zip(offsets, layout.tensors, strict=True)
            ],
        )


def _placed(
    storage: torch.UntypedStorage, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(storage, offset // dtype.itemsize, tuple(shape))  # pyright: ignore
