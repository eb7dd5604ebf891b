"""A bucket of gradients as a communication hook sees it, made by hand."""

from __future__ import annotations

from typing import Any

import torch


class FakeBucket:
    """The only bucket of its step, with the gradients that a test passes."""

    def __init__(self, tensors: list[torch.Tensor], group: Any) -> None:
        self.flat = torch.cat([t.reshape(-1) for t in tensors])
        self.shapes, self.group = [t.shape for t in tensors], group

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [p.view(shape) for p, shape in zip(parts, self.shapes, strict=True)]

    def names(self) -> list[str]:
        return [f"p{i}" for i in range(len(self.shapes))]

    def is_last(self) -> bool:
        return True
