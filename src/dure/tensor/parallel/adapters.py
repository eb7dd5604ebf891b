"""Low-rank adapters: modules that wrap a Linear or an Embedding, and add to what it computes.

An adapter of ``x W'`` adds ``x A' B'`` to it: W is [out, in], A [r, in], B [out, r], r small. A
style that is given the wrapper is the style of all in it: what comes in and goes out is moved
around the wrapper, not around the layer, so all within are operators on DTensors; and a parameter
that has the layer's length where the style cuts the layer is cut there, too:

    ColwiseParallel   A whole      B Shard(0)   the product is sharded as the layer's
    RowwiseParallel   A Shard(1)   B whole      the product is terms of a sum, as the layer's

So an adapter communicates nothing in forward, and in backward only what A's (B's) gradient is terms
of. What a wrapper does besides (dropout, scaling, several adapters, merging) is right by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dure.errors import UsageError
from dure.tensor.placement_types import Placement, Replicate, Shard

__all__ = ["Around", "layer_within", "placement_like"]

_OWN = ("weight", "bias")


def layer_within(
    module: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> tuple[nn.Module, list[tuple[nn.Module, str]]] | None:
    """Return the layer that a module is or wraps, and the other parameters: whose, and their names.

    Args:
        module: A layer; or what has one, pairs of Linears that lead from its input to a lower
            number of features and from there to its output, and parameters of its own.
        kinds: Of layers.

    Returns:
        None for any other module.
    """
    layers = [m for m in module.modules() if isinstance(m, kinds)]
    if not layers:
        return None
    sizes = [m.get_parameter("weight").numel() for m in layers]
    layer = module if module in layers else layers[sizes.index(max(sizes))]
    more = [
        (owner, name)
        for owner in module.modules()
        for name, _ in owner.named_parameters(recurse=False)
        if owner is not layer or name not in _OWN
    ]
    fits = _lead_through(layer, [m for m in layers if m is not layer]) and all(
        owner in (module, *layers) or isinstance(owner, (nn.ParameterDict, nn.ParameterList))
        for owner, _ in more
    )
    return (layer, more) if fits and (more or layer is module) else None


def _lead_through(layer: nn.Module, pairs: list[nn.Module]) -> bool:
    """Tell whether Linears are pairs from the layer's input over fewer features to its output."""
    size_out, size_in = layer.get_parameter("weight").shape
    shapes = [m.weight.shape for m in pairs if isinstance(m, nn.Linear)]
    low = min(size_out, size_in)
    down = sorted(rank for rank, into in shapes if into == size_in and rank < low)
    up = sorted(rank for out, rank in shapes if out == size_out and rank < low)
    return down == up and 2 * len(down) == len(pairs)


def placement_like(parameter: torch.Tensor, weight: torch.Tensor, cut: Placement) -> Placement:
    """Return the cut of a layer's weight for a parameter that has its length there; else whole."""
    assert isinstance(cut, Shard)
    alike = parameter.ndim > cut.dim and parameter.shape[cut.dim] == weight.shape[cut.dim]
    return cut if alike else Replicate()


class Around:
    """What is called before and after a layer or, where one runs, the module that wraps it.

    Threads: as the layer.
    """

    def __init__(
        self,
        style: str,
        before: Callable[[tuple[Any, ...]], tuple[Any, ...]],
        after: Callable[[Any], Any],
    ) -> None:
        self._style, self._before, self._after = style, before, after
        self._inside = False

    def register(self, layer: nn.Module, wrapper: nn.Module) -> None:
        """Put the hooks on a layer and on what wraps it, which may be itself; never twice.

        Raises:
            UsageError: The layer is parallel in another way.
        """
        known: Around | None = getattr(layer, "_dure_around", None)
        if known is None:
            known = self
            layer._dure_around = self  # pyright: ignore
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer)
        elif known._style != self._style:
            raise UsageError("the layer is parallel already", seen=f"{known._style}")
        if not hasattr(wrapper, "_dure_around"):
            wrapper._dure_around = known  # pyright: ignore
            wrapper.register_forward_pre_hook(known._enter)
            wrapper.register_forward_hook(known._leave, always_call=True)

    def _before_layer(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self._inside else self._before(inputs)

    def _after_layer(self, _: nn.Module, inputs: object, output: Any) -> Any:
        return None if self._inside else self._after(output)

    def _enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._inside = True
        return self._before(inputs)

    def _leave(self, _: nn.Module, inputs: object, output: Any) -> Any:
        self._inside = False
        return None if output is None else self._after(output)  # None: forward raised
