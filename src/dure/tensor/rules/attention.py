"""Scaled dot product attention, for the kernels of the CPU and of GPUs.

Tensors are [batch, heads, length, width]. Batch and heads may be sharded. If there are fewer heads
of keys and values, they may be sharded only if each rank gets the heads that its queries need. On
the CPU the length of the queries may be sharded if there is no causal mask, which depends on
positions; the gradients of keys and values are then Partial. Kernels for GPUs return more than the
output (logarithms of sums in a custom layout, states of random generators); their backward kernels
take these unchanged.

Tests replace the kernels for GPUs by those of the CPU; on a GPU they ran with one rank
(docs/gpu.md).
"""

from __future__ import annotations

import torch

from dure.errors import PlacementError
from dure.tensor.call import SUM, AxisStrategy, OpCall, R
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import by_value, rule, zeros_where_empty
from dure.tensor.rules.pointwise import aligned

aten = torch.ops.aten
BATCH, HEADS, LENGTH = 0, 1, 2
FORWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
_CUT_AS_QUERIES = ("query", "grad_out", "grad_out_", "out", "logsumexp")
_MASKS = ("attn_mask", "attn_bias")


def _ways(call: OpCall) -> list[tuple[Shard, Placement, list[Placement]]]:
    """Return placements of queries, of keys and values, and of the mask if there is one."""
    query, key = call.spec("query"), call.spec("key")
    cuts = [BATCH]
    # If keys have fewer heads, each of their heads belongs to a run of the queries' heads. Sharding
    # keeps these together only if all ranks have the same number of heads.
    mesh = query.mesh
    even = all(key.shape[HEADS] % size == 0 for size in (mesh.size(), *mesh.shape))
    if query.shape[HEADS] == key.shape[HEADS] or even:
        cuts.append(HEADS)
    if call.op not in (*FORWARD, *BACKWARD) and not call.arg("is_causal"):
        cuts.append(LENGTH)
    scores = (*query.shape[:3], key.shape[2])
    masks = [call.spec(name) for name in _MASKS if call.operand(name) is not None]
    return [
        (Shard(d), R if d == LENGTH else Shard(d), [aligned(mask, scores, d) for mask in masks])
        for d in cuts
    ]


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    local=zeros_where_empty, contiguous=True,
)  # fmt: skip
def _attention(call: OpCall) -> list[AxisStrategy]:
    return [
        AxisStrategy((cut, other, other, *mask), (cut, cut)) for cut, other, mask in _ways(call)
    ]


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    local=zeros_where_empty, contiguous=True,
)  # fmt: skip
def _attention_backward(call: OpCall) -> list[AxisStrategy]:
    found: list[AxisStrategy] = []
    for cut, other, mask in _ways(call):
        of_keys = SUM if other is R else cut
        inputs = (cut, cut, other, other, cut, cut, *mask)
        found.append(AxisStrategy(inputs, (cut, of_keys, of_keys)))
    return found


# ---- kernels for GPUs ----------------------------------------------------------------------------

by_value.update(FORWARD, BACKWARD)  # their rules depend on `dropout_p`


def _by_name(call: OpCall, cut: Shard, mask: list[Placement]) -> tuple[Placement, ...]:
    """Return a placement for each operand; states of random generators are replicated."""
    cuts = dict.fromkeys((*_CUT_AS_QUERIES, "key", "value"), cut)
    given = {**cuts, **dict.fromkeys(_MASKS, mask[0] if mask else R)}
    numbers = {call.operand(name): placement for name, placement in given.items()}
    return tuple(numbers.get(number, R) for number in range(len(call.operands)))


def _check_dropout(call: OpCall) -> None:
    if call.arg("dropout_p"):
        raise PlacementError(
            "dropout in attention is not supported for DTensors on a GPU",
            op=call.name,
            seen=f"dropout_p={call.arg('dropout_p')}",
            fix="Use dropout_p=0, or sdpa_kernel(SDPBackend.MATH).",
        )


@rule(*FORWARD, local=zeros_where_empty, contiguous=True)
def _gpu_attention(call: OpCall) -> list[AxisStrategy]:
    """Return strategies for the output and the logarithms of sums; other results are replicated."""
    _check_dropout(call)
    others = (R,) * (len(call.outputs) - 2)
    return [
        AxisStrategy(_by_name(call, cut, mask), (cut, cut, *others)) for cut, _, mask in _ways(call)
    ]


@rule(*BACKWARD, local=zeros_where_empty, contiguous=True)
def _gpu_attention_backward(call: OpCall) -> list[AxisStrategy]:
    """Return strategies for the gradients; that of a mask is Partial if the mask is replicated."""
    found: list[AxisStrategy] = []
    for cut, _, mask in _ways(call):
        of_mask = tuple(SUM if p is R else p for p in mask)
        others = (*of_mask, R)[: len(call.outputs) - 3]
        found.append(AxisStrategy(_by_name(call, cut, mask), (cut, cut, cut, *others)))
    return found
