"""Scaled dot product attention, as the CPU's kernel computes it.

Tensors are [batch, heads, length, width]. Batch and heads may be sharded; heads of keys and values,
where there are fewer, only if each rank's queries then find theirs on it. The queries' length may
be, unless a causal mask counts their positions; then keys and values get gradients that are terms.
"""

from __future__ import annotations

import torch

from dure.tensor.call import OpCall, Strategy
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.registry import rule, zeros_where_empty
from dure.tensor.rules.pointwise import aligned
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten
R = Replicate()
SUM = Partial("sum")
BATCH, HEADS, LENGTH = 0, 1, 2


def _mask(call: OpCall, shape: tuple[int, ...], dim: int) -> list[Placement]:
    """Return how the mask must lie, if there is one."""
    number = call.operand("attn_mask")
    return [] if number is None else [aligned(call.operands[number], shape, dim)]


def _ways(call: OpCall) -> list[tuple[int, bool]]:
    """Return dimensions of the queries that may be cut, and whether keys and values are, too."""
    query, key = _operand(call, "query"), _operand(call, "key")
    found = [(BATCH, True)]
    # With fewer heads for keys, each of theirs serves a run of the queries': both are cut
    # between runs only if ranks have equally many.
    mesh = query.mesh
    even = all(key.shape[HEADS] % size == 0 for size in (mesh.size(), *mesh.shape))
    if query.shape[HEADS] == key.shape[HEADS] or even:
        found.append((HEADS, True))
    if not call.arg("is_causal"):
        found.append((LENGTH, False))
    return found


def _operand(call: OpCall, name: str) -> DTensorSpec:
    number = call.operand(name)
    assert number is not None
    return call.operands[number]


def _scores_shape(call: OpCall) -> tuple[int, ...]:
    query, key = _operand(call, "query"), _operand(call, "key")
    return (*query.shape[:3], key.shape[2])


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    local=zeros_where_empty, contiguous=True,
)  # fmt: skip
def _attention(call: OpCall) -> list[Strategy]:
    found: list[Strategy] = []
    for dim, alike in _ways(call):
        cut = Shard(dim)
        other = cut if alike else R
        mask = _mask(call, _scores_shape(call), dim)
        found.append(Strategy((cut, other, other, *mask), (cut, cut)))
    return found


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    local=zeros_where_empty, contiguous=True,
)  # fmt: skip
def _attention_backward(call: OpCall) -> list[Strategy]:
    found: list[Strategy] = []
    for dim, alike in _ways(call):
        cut = Shard(dim)
        other = cut if alike else R
        mask = _mask(call, _scores_shape(call), dim)
        inputs = (cut, cut, other, other, cut, cut, *mask)
        found.append(Strategy(inputs, (cut, cut, cut) if alike else (cut, SUM, SUM)))
    return found
