"""Scaled dot product attention, as the CPU's kernel computes it.

Tensors are [batch, heads, length, width]. Batch and heads may be sharded; heads of keys and values,
where there are fewer, only if each rank's queries then find theirs on it. The queries' length may
be, unless a causal mask counts their positions; then keys and values get gradients that are terms.
"""

from __future__ import annotations

import torch

from dure.tensor.call import SUM, OpCall, R, Strategy
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule, zeros_where_empty
from dure.tensor.rules.pointwise import aligned

aten = torch.ops.aten
BATCH, HEADS, LENGTH = 0, 1, 2


def _ways(call: OpCall) -> list[tuple[Shard, Placement, list[Placement]]]:
    """Return how queries may be cut, how keys and values then lie, and the mask if there is one."""
    query, key = call.spec("query"), call.spec("key")
    cuts = [BATCH]
    # With fewer heads for keys, each of theirs serves a run of the queries': both are cut
    # between runs only if ranks have equally many.
    mesh = query.mesh
    even = all(key.shape[HEADS] % size == 0 for size in (mesh.size(), *mesh.shape))
    if query.shape[HEADS] == key.shape[HEADS] or even:
        cuts.append(HEADS)
    if not call.arg("is_causal"):
        cuts.append(LENGTH)
    scores = (*query.shape[:3], key.shape[2])
    masks = [] if call.operand("attn_mask") is None else [call.spec("attn_mask")]
    return [
        (Shard(d), R if d == LENGTH else Shard(d), [aligned(mask, scores, d) for mask in masks])
        for d in cuts
    ]


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    local=zeros_where_empty, contiguous=True,
)  # fmt: skip
def _attention(call: OpCall) -> list[Strategy]:
    return [Strategy((cut, other, other, *mask), (cut, cut)) for cut, other, mask in _ways(call)]


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    local=zeros_where_empty, contiguous=True,
)  # fmt: skip
def _attention_backward(call: OpCall) -> list[Strategy]:
    found: list[Strategy] = []
    for cut, other, mask in _ways(call):
        of_keys = SUM if other is R else cut
        inputs = (cut, cut, other, other, cut, cut, *mask)
        found.append(Strategy(inputs, (cut, of_keys, of_keys)))
    return found
