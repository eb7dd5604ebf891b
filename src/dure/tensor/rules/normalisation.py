"""Layer, group and batch normalization.

Layers and groups: the normalized dimensions must not be sharded, the dimensions before them may be.
Weights are replicated, and their gradients are Partial if rows are sharded.

Batch normalization computes statistics over rows. In training the rows are gathered, so that
results equal those of one rank; channels may be sharded. With fixed statistics rows may be sharded,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dure.tensor.call import SUM, AxisStrategy, OpCall, R, with_one
from dure.tensor.placement_types import Placement, Shard
from dure.tensor.registry import rule, with_argument, zeros_where_empty
from dure.tensor.spec import TensorMeta

aten = torch.ops.aten


def _by_name(call: OpCall, placements: Mapping[str, Placement]) -> tuple[Placement, ...]:
    """Return a placement for each operand; those not named are replicated."""
    numbers = {call.operand(name): placement for name, placement in placements.items()}
    return tuple(numbers.get(number, R) for number in range(len(call.operands)))


def _rows(call: OpCall) -> list[Shard]:
    """Return the cuts through dimensions that are not normalized over."""
    return [Shard(d) for d in range(call.spec("input").ndim - len(call.arg("normalized_shape")))]


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(call: OpCall) -> list[AxisStrategy]:
    count = len(call.outputs)
    return [AxisStrategy(_by_name(call, {"input": row}), (row,) * count) for row in _rows(call)]


@rule(
    aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default,
    local=zeros_where_empty,
)  # fmt: skip
def _layer_norm_backward(call: OpCall) -> list[AxisStrategy]:
    count = len(call.outputs)
    found: list[AxisStrategy] = []
    for row in _rows(call):
        inputs = _by_name(call, dict.fromkeys(("grad_out", "input", "mean", "rstd"), row))
        found.append(AxisStrategy(inputs, (row, *(SUM,) * (count - 1))))
    return found + with_one(call)


# ---- groups --------------------------------------------------------------------------------------


def _group_norm_local(call: OpCall) -> Callable[..., Any] | None:
    """Pass the number of this rank's rows."""
    spec = call.spec("input")
    rows = spec.local_shape[0]
    if rows == spec.shape[0]:
        return None
    return with_argument(call, "N", rows) if rows else zeros_where_empty(call)


@rule(aten.native_group_norm.default, local=_group_norm_local)
def _group_norm(call: OpCall) -> list[AxisStrategy]:
    return [AxisStrategy(_by_name(call, {"input": Shard(0)}), (Shard(0),) * 3)]


@rule(aten.native_group_norm_backward.default, local=_group_norm_local)
def _group_norm_backward(call: OpCall) -> list[AxisStrategy]:
    inputs = _by_name(call, dict.fromkeys(("grad_out", "input", "mean", "rstd"), Shard(0)))
    found = [AxisStrategy(inputs, (Shard(0), SUM, SUM))]
    return found + with_one(call)


# ---- batches -------------------------------------------------------------------------------------

_CHANNELS = (
    "weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var",
)  # fmt: skip
_SAVES_NOTHING = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_no_update.default,
}
"""On the CPU, with fixed statistics."""


@rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    local=zeros_where_empty,
)
def _batch_norm(call: OpCall) -> list[AxisStrategy]:
    """Results: the output, the statistics saved, the kernel's own memory, running statistics."""
    training = call.arg("training") if call.has("training") else "with_update" in call.name
    if not training and call.op in _SAVES_NOTHING and call.operands[0].mesh.device_type == "cpu":
        none = TensorMeta.of(torch.empty(0, dtype=call.operands[0].meta.dtype, device="cpu"))
        call.outputs = (call.outputs[0], none, none, *call.outputs[3:])
    if call.operands[0].ndim < 2:
        return []
    num_running = 2 if "functional" in call.name else 0
    own = (R,) * (len(call.outputs) - 3 - num_running)  # backward takes it unchanged
    saved = Shard(0) if training else R
    channels = _by_name(call, {"input": Shard(1), **dict.fromkeys(_CHANNELS, Shard(0))})
    results = (Shard(1), saved, saved, *own, *(Shard(0),) * num_running)
    found = [AxisStrategy(channels, results)]
    if not training:
        rows = (Shard(0), R, R, *own, *(R,) * num_running)
        found.append(AxisStrategy(_by_name(call, {"input": Shard(0)}), rows))
    return found


@rule(
    aten.native_batch_norm_backward.default, aten.batch_norm_backward.default,
    local=zeros_where_empty,
)  # fmt: skip
def _batch_norm_backward(call: OpCall) -> list[AxisStrategy]:
    training = call.arg("train" if call.has("train") else "update")
    given = {name: Shard(0) for name in _CHANNELS if training or "save" not in name}
    channels = _by_name(call, {"grad_out": Shard(1), "input": Shard(1), **given})
    found = [AxisStrategy(channels, (Shard(1), Shard(0), Shard(0)))]
    if not training:
        rows = _by_name(call, {"grad_out": Shard(0), "input": Shard(0)})
        found.append(AxisStrategy(rows, (Shard(0), SUM, SUM)))
    return found + with_one(call)


@rule(aten.cudnn_batch_norm_backward.default, local=zeros_where_empty)
def _cudnn_batch_norm_backward(call: OpCall) -> list[AxisStrategy]:
    """Return the strategy for channels: rows are all of one rank, as in forward in training."""
    cuts = {"input": Shard(1), "grad_output": Shard(1), **dict.fromkeys(_CHANNELS, Shard(0))}
    found = [AxisStrategy(_by_name(call, cuts), (Shard(1), Shard(0), Shard(0)))]
    gradient = call.operand("grad_output")
    assert gradient is not None
    return found + with_one(call, number=gradient)
