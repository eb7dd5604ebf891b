"""The rules of operators, a family a file; what a rule is, is told in registry.py."""

from __future__ import annotations

from dure.tensor.rules import (
    along,
    attention,
    convolution,
    creation,
    embedding,
    foreach,
    indexing,
    matmul,
    normalisation,
    pointwise,
    reductions,
    softmax,
    views,
)

__all__ = [
    "along",
    "attention",
    "convolution",
    "creation",
    "embedding",
    "foreach",
    "indexing",
    "matmul",
    "normalisation",
    "pointwise",
    "reductions",
    "softmax",
    "views",
]
