"""Page-locked memory of the host, which an accelerator copies while the host continues."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["pinned_empty"]


def pinned_empty(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate page-locked memory, or other memory if the accelerator has no allocator for it."""
    try:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
    except NotImplementedError:  # a device that was made with torch's Python backend
        return torch.empty(size, dtype=dtype, device="cpu")
