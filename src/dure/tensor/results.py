"""What the results of an operator are, found by running it on tensors without memory.

That takes longer than all else of the first call of a kind, and how tensors lie has no part in it:
it is found once for all placements and meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dure.tensor.call import OpCall, check_out, fill, outs_of
from dure.tensor.spec import DTensorSpec, TensorMeta

__all__ = ["forget_results", "leaves", "results_of"]

Results = tuple[TensorMeta | None, ...]
_MOST = 1 << 16
_known: dict[Any, Results] = {}


def results_of(call: OpCall, key: Sequence[Any]) -> Results:
    """Return shape, strides and dtype of each result that is a tensor, None for others.

    Args:
        call: The call.
        key: What calls of one kind have in common; specs stand in it for tensors.
    """
    whole = (torch.get_default_dtype(), _without_placements(tuple(key)))
    try:
        found = _known.get(whole)
    except TypeError:  # it has what can be compared with nothing, such as a symbolic size
        return _run(call)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[whole] = _run(call)
    return found


def forget_results() -> None:
    """Find them anew: what an operator does may have changed."""
    _known.clear()


def leaves(result: Any) -> list[Any]:
    """Return the results of an operator as a list; None for what is no tensor."""
    found = pytree.tree_leaves(result)
    return [one if isinstance(one, torch.Tensor) else None for one in found]


def _without_placements(key: Any) -> Any:
    if type(key) is DTensorSpec:
        return key.meta
    return tuple(map(_without_placements, key)) if type(key) is tuple else key


def _run(call: OpCall) -> Results:
    metas, outs = [spec.meta.empty() for spec in call.operands], outs_of(call)
    for number in outs:
        metas[number] = metas[number].new_empty(0)  # it takes the shape of the result
    args, kwargs = fill(call.args, call.kwargs, call.places, metas)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    found = leaves(call.op(*args, **kwargs))
    for number in outs:
        check_out(call, number, metas[number].shape)
    return tuple(None if t is None else TensorMeta.of(t) for t in found)
