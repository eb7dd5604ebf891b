"""Scaled dot product attention, as the CPU's kernel and those for GPUs compute it.

Tensors are [batch, heads, length, width]. Batch and heads may be sharded; heads of keys and values,
where there are fewer, only if each rank's queries then find theirs on it. On the CPU the queries'
length may be, unless a causal mask counts their positions; then keys and values get gradients that
are terms. Kernels for GPUs return other things beside the result (logarithms of sums, in a layout
of their own; states of random generators), which a backward kernel takes as they are.

Tests put kernels for the CPU in their place; on a GPU they have run with one rank (docs/gpu.md).
"""

from __future__ import annotations

import torch

from dure.errors import PlacementError
from dure.tensor.call import SUM, OpCall, R, Strategy
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
    """Return how queries may be cut, how keys and values then lie, and the mask if there is one."""
    query, key = call.spec("query"), call.spec("key")
    cuts = [BATCH]
    # With fewer heads for keys, each of theirs serves a run of the queries': both are cut
    # between runs only if ranks have equally many.
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


# ---- kernels for GPUs ----------------------------------------------------------------------------

by_value.update(FORWARD, BACKWARD)  # they look at `dropout_p`


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
def _gpu_attention(call: OpCall) -> list[Strategy]:
    """Return cuts of the result and of the logarithms of sums, which come second."""
    _check_dropout(call)
    others = (R,) * (len(call.outputs) - 2)
    return [
        Strategy(_by_name(call, cut, mask), (cut, cut, *others)) for cut, _, mask in _ways(call)
    ]


@rule(*BACKWARD, local=zeros_where_empty, contiguous=True)
def _gpu_attention_backward(call: OpCall) -> list[Strategy]:
    """Return cuts of the gradients; a mask's is a sum over what the mask does not have."""
    found: list[Strategy] = []
    for cut, _, mask in _ways(call):
        of_mask = tuple(SUM if p is R else p for p in mask)
        others = (*of_mask, R)[: len(call.outputs) - 3]
        found.append(Strategy(_by_name(call, cut, mask), (cut, cut, cut, *others)))
    return found
