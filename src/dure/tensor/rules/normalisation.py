"""Normalisation: layers, groups, batches.

What is normalised over is whole; the dimensions before it may be sharded. Weights are whole, and
their gradients are terms of a sum over the sharded rows.

A batch is normalised over its rows, so that these are gathered in training, as one rank would
compute it; its channels may be sharded. With fixed statistics its rows may be, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dure.tensor.call import OpCall, Strategy
from dure.tensor.placement_types import Partial, Placement, Replicate, Shard
from dure.tensor.registry import rule, zeros_where_empty
from dure.tensor.spec import DTensorSpec

aten = torch.ops.aten
R = Replicate()
SUM = Partial("sum")
LINEAR = (SUM, Partial("avg"))


def _by_name(call: OpCall, placements: Mapping[str, Placement]) -> tuple[Placement, ...]:
    """Return a placement for each operand; those not named are whole."""
    numbers = {call.operand(name): placement for name, placement in placements.items()}
    return tuple(numbers.get(number, R) for number in range(len(call.operands)))


def _rows(call: OpCall) -> list[Shard]:
    """Return the cuts through dimensions that are not normalised over."""
    number = call.operand("input")
    assert number is not None
    return [Shard(d) for d in range(call.operands[number].ndim - len(call.arg("normalized_shape")))]


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(call: OpCall) -> list[Strategy]:
    count = len(call.outputs)
    return [Strategy(_by_name(call, {"input": row}), (row,) * count) for row in _rows(call)]


@rule(
    aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default,
    local=zeros_where_empty,
)  # fmt: skip
def _layer_norm_backward(call: OpCall) -> list[Strategy]:
    count = len(call.outputs)
    found: list[Strategy] = []
    for row in _rows(call):
        inputs = _by_name(call, dict.fromkeys(("grad_out", "input", "mean", "rstd"), row))
        found.append(Strategy(inputs, (row, *(SUM,) * (count - 1))))
    return found + [
        Strategy(_by_name(call, {"grad_out": term}), (term,) * count) for term in LINEAR
    ]


# ---- groups --------------------------------------------------------------------------------------


def _group_norm_local(
    call: OpCall, operands: Sequence[DTensorSpec], results: Sequence[DTensorSpec | None]
) -> Callable[..., Any] | None:
    """Give the operator the number of this rank's rows."""
    number = call.operand("input")
    assert number is not None
    spec = operands[number]
    rows, op = spec.local_shape[0], call.op
    if rows == spec.shape[0]:
        return None
    if not rows:
        return zeros_where_empty(call, operands, results)
    place = 3 if op is aten.native_group_norm.default else 5

    def run(*args: Any) -> Any:
        return op(*args[:place], rows, *args[place + 1 :])

    return run


@rule(aten.native_group_norm.default, local=_group_norm_local)
def _group_norm(call: OpCall) -> list[Strategy]:
    return [Strategy(_by_name(call, {"input": Shard(0)}), (Shard(0),) * 3)]


@rule(aten.native_group_norm_backward.default, local=_group_norm_local)
def _group_norm_backward(call: OpCall) -> list[Strategy]:
    inputs = _by_name(call, dict.fromkeys(("grad_out", "input", "mean", "rstd"), Shard(0)))
    found = [Strategy(inputs, (Shard(0), SUM, SUM))]
    return found + [Strategy(_by_name(call, {"grad_out": term}), (term,) * 3) for term in LINEAR]


# ---- batches -------------------------------------------------------------------------------------

_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _channels(call: OpCall) -> dict[str, Placement]:
    return dict.fromkeys(_CHANNELS, Shard(0))


@rule(aten.native_batch_norm.default, local=zeros_where_empty)
def _batch_norm(call: OpCall) -> list[Strategy]:
    if call.operands[0].ndim < 2:
        return []
    training = call.arg("training")
    saved = Shard(0) if training else R
    channels = _by_name(call, {"input": Shard(1), **_channels(call)})
    found = [Strategy(channels, (Shard(1), saved, saved))]
    if not training:
        found.append(Strategy(_by_name(call, {"input": Shard(0)}), (Shard(0), R, R)))
    return found


@rule(aten.native_batch_norm_backward.default, local=zeros_where_empty)
def _batch_norm_backward(call: OpCall) -> list[Strategy]:
    training = call.arg("train")
    given = {name: p for name, p in _channels(call).items() if training or "save" not in name}
    channels = _by_name(call, {"grad_out": Shard(1), "input": Shard(1), **given})
    found = [Strategy(channels, (Shard(1), Shard(0), Shard(0)))]
    if not training:
        rows = _by_name(call, {"grad_out": Shard(0), "input": Shard(0)})
        found.append(Strategy(rows, (Shard(0), SUM, SUM)))
    return found + [Strategy(_by_name(call, {"grad_out": term}), (term,) * 3) for term in LINEAR]
