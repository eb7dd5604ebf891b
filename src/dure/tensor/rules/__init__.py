"""The sharding rules of operators, one file per family; registry.py describes rules."""

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
