"""How a reducer hears of a backward: hooks of autograd on parameters and on the module's outputs.

*Parameters.* Autograd tells of each gradient that it has accumulated. These hooks live as long as
the parameters, and therefore hold the reducer weakly: wrapping a module once more, or throwing the
wrapper away, leaves none of the old one behind.

*Outputs.* A backward may reach no parameter at all on one rank (all its inputs were masked out),
while the others wait for it in a reduction. A gradient that arrives at an output is the sign that
such a backward is running. These hooks live as long as the graph, and hold the reducer, so that the
backward is reduced also where the program has let go of the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.data.nests import tensors_of
from dure.parallel.ddp import graphs

if TYPE_CHECKING:
    from dure.parallel.ddp.reducer import Reducer
    from dure.parallel.ddp.slots import Slot

__all__ = ["hear_outputs", "hear_parameters"]


def hear_parameters(reducer: Reducer, slots: Iterable[Slot]) -> weakref.finalize[..., Reducer]:
    """Have `reducer.on_gradient` called for each gradient of `slots`; return what ends that."""
    handles = [_hear_parameter(weakref.ref(reducer), slot) for slot in slots]
    end = weakref.finalize(reducer, _remove_all, handles)
    end.atexit = False
    return end


def _hear_parameter(reducer: weakref.ref[Reducer], slot: Slot) -> torch.utils.hooks.RemovableHandle:
    def gradient_accumulated(_: torch.Tensor) -> None:
        me = reducer()
        if me is not None:
            me.on_gradient(slot)

    return slot.parameter.register_post_accumulate_grad_hook(gradient_accumulated)


def hear_outputs(reducer: Reducer, outputs: object) -> None:
    """Have `reducer.on_output` called when a gradient arrives at a tensor of `outputs`."""
    for tensor in tensors_of(outputs):
        if tensor.grad_fn is not None:
            tensor.register_hook(_output_hook(reducer, graphs.below(tensor.grad_fn)))


def _output_hook(reducer: Reducer, below: Sequence[Any]) -> Callable[[torch.Tensor], None]:
    """Make an output's hook; `below` are the graph's nodes under that output (Any: autograd's).

    It has not the output's own node, so that the graph is free to go.
    """

    def gradient_arrived(_: torch.Tensor) -> None:
        reducer.on_output(below)

    return gradient_arrived


def _remove_all(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
