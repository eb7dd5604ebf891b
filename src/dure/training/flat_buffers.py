"""Many tensors side by side in one flat tensor, so that one collective carries them all.

*Flat buffers* (`FlatBuffers`) are one block of memory for each dtype and device, from which flat
tensors are taken one after another. To take all of them again, in another order say, the blocks
restart at their beginning: no memory is allocated, and no other rank is asked.

    block of float32   | taken first |  taken second  |   third   ...        | free |

Each tensor begins at an address that the fastest instructions can use.

*Packing* is the other direction: tensors that lie anywhere are copied into a flat tensor, and out
of it again (`packed`, `unpack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

__all__ = [
    "SMALL_BYTES",
    "FlatBuffers",
    "Kind",
    "by_kind",
    "dense_strides",
    "packed",
    "padded",
    "unpack",
]

SMALL_BYTES = 64 * 1024
"""Up to here packing costs less than a collective of its own."""

_ALIGNMENT_BYTES = 64

Kind = tuple[torch.dtype, torch.device]
"""What tensors must have in common to lie side by side."""


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that `tensor` has without gaps: its own, if it has none nor overlaps."""
    strides = tuple(tensor.stride())
    expected = 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return strides


def by_kind(tensors: Iterable[torch.Tensor]) -> dict[Kind, list[torch.Tensor]]:
    """Return tensors by dtype and device, in their order."""
    kinds: dict[Kind, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of one kind end to end into a flat tensor [sum of their elements]."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what lies end to end in `flat` into `tensors`."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def padded(numel: int, dtype: torch.dtype) -> int:
    """Round a number of elements up, so that what follows them is aligned."""
    step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // step) * step


class FlatBuffers:
    """Blocks of memory from which flat tensors are taken; see the module's text.

    Args:
        numels: Elements in the block of each kind; `padded` says what each piece takes.
        allocate: Makes a block of elements.

    Collective:
        Construction, where `allocate` is.
    """

    def __init__(
        self,
        numels: Mapping[Kind, int],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
    ) -> None:
        self._blocks = {(d, where): allocate(n, d, where) for (d, where), n in numels.items()}
        self._taken = dict.fromkeys(self._blocks, 0)

    def restart(self) -> None:
        """Take from the beginning again; memory that was taken before gets overwritten."""
        self._taken = dict.fromkeys(self._blocks, 0)

    def take(self, kind: Kind, numel: int) -> torch.Tensor:
        """Return the next `numel` elements of the block of a kind."""
        start = self._taken[kind]
        self._taken[kind] = padded(start + numel, kind[0])
        flat = self._blocks[kind][start : start + numel]
        assert flat.numel() == numel, "the block is too small"
        return flat
