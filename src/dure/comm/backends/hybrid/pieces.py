"""Tensors in pieces: cut into equal parts, and made of the bytes that travelled with the calls.

Small operations are over with their opening (opening.py): each rank's frame has brought its bytes,
and here they become tensors again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm.backends.hybrid.opening import Frame

__all__ = ["as_tensor", "even_parts", "fill", "parts_of"]


def parts_of(frames: Sequence[Frame], like: torch.Tensor) -> list[torch.Tensor]:
    """Return the data of all ranks as tensors of the dtype of `like`."""
    return [as_tensor(frame.data, like.dtype) for frame in frames]


def as_tensor(data: bytes | None, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes that travelled with a call as a flat tensor of its own."""
    assert data is not None
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def fill(tensor: torch.Tensor, data: bytes | None) -> None:
    """Write bytes that travelled with a call into a tensor."""
    flat = tensor.detach().view(-1)
    if flat.numel():
        flat.copy_(as_tensor(data, flat.dtype))


def even_parts(tensor: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Cut a tensor into `n` parts of one length."""
    flat = tensor.detach().view(-1)
    k = flat.numel() // n
    return [flat[i * k : (i + 1) * k] for i in range(n)]
