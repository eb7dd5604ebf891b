"""The linear algebra of PowerSGD: bases, and which matrices are worth compressing."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import torch

__all__ = ["first_basis", "orthogonalize", "same_shapes", "worth_compressing"]


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> torch.Tensor:
    """Return orthonormal bases of the columns of `matrices`.

    A single column is divided by its length; more of them go through a QR factorisation, which
    keeps its columns orthogonal even where those it is given are not independent. Nothing comes out
    as zero or NaN that did not come in so: from a column of zeros comes a unit vector, so that a
    gradient that vanished once does not leave a basis that can see nothing for ever.

    Args:
        matrices: [b, n, r] with r <= n, of any real floating dtype.
        epsilon: Added to the length of a single column.

    Returns:
        [b, n, r], of the same dtype; computed in float32 at least.

    Cost: 2 n r^2 multiplications a matrix.
    """
    dtype = matrices.dtype
    wide = matrices.float() if dtype.itemsize < 4 else matrices
    if matrices.shape[2] > 1:
        return torch.linalg.qr(wide).Q.to(dtype)
    length = wide.norm(dim=1, keepdim=True)
    unit = torch.zeros_like(wide)
    unit[:, 0] = 1
    return torch.where(length > 0, wide / (length + epsilon), unit).to(dtype)


def first_basis(seed: Hashable, shape: tuple[int, int, int], like: torch.Tensor) -> torch.Tensor:
    """Return random numbers [b, m, r], normal, that depend on `seed` alone: alike on all ranks.

    Args:
        seed: Anything whose repr is the same on all ranks.
        shape: Of the result.
        like: Has the dtype and device of the result.
    """
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.randn(shape, generator=generator).to(like)


def worth_compressing(gradient: torch.Tensor, rank: int, min_rate: float) -> int | None:
    """Return how many numbers are sent for `gradient` as a matrix; None if it shall go as it is."""
    if gradient.dim() < 2 or not gradient.numel():
        return None
    rows = gradient.shape[0]
    columns = gradient.numel() // rows
    after = (rows + columns) * min(rows, columns, rank)
    return after if after * min_rate < gradient.numel() else None


def same_shapes(
    named: Sequence[tuple[str, torch.Tensor]], together: bool
) -> list[list[tuple[str, torch.Tensor]]]:
    """Return tensors of the same shape together, or each by itself."""
    if not together:
        return [[one] for one in named]
    groups: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        groups.setdefault(tuple(tensor.shape), []).append((name, tensor))
    return list(groups.values())
