"""Low-rank adapters: modules that wrap a Linear or an Embedding, and add to what it computes.

An adapter of ``x W'`` adds ``x A' B'`` to it: W is [out, in], A [r, in], B [out, r], r small. A
style applied to the wrapper applies to all modules in it. Inputs and outputs are redistributed
around the wrapper instead of the layer, so the wrapper computes with DTensors. A parameter is cut
along the layer's dimension if it has the same length there:

    ColwiseParallel   A replicated   B Shard(0)     the product is sharded like the layer's
    RowwiseParallel   A Shard(1)     B replicated   the product is Partial like the layer's

So an adapter communicates nothing in forward, and in backward only reduces the gradient of the
replicated parameter. Other operations of a wrapper (dropout, scaling, several adapters, merging)
need no special handling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dure.errors import UsageError
from dure.tensor.placement_types import Placement, Replicate, Shard

__all__ = ["LayerHooks", "layer_within", "placement_like"]

_OWN = ("weight", "bias")


def layer_within(
    module: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> tuple[nn.Module, list[tuple[nn.Module, str]]] | None:
    """Return the layer that a module is or wraps, and other parameters as (module, name).

    Args:
        module: A layer, or a wrapper: it contains a layer, pairs of Linears (from the layer's input
            to fewer features, and from there to its output), and possibly parameters.
        kinds: Classes of layers.

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
    """Return whether Linears are pairs from the layer's input over fewer features to its output."""
    size_out, size_in = layer.get_parameter("weight").shape
    shapes = [m.weight.shape for m in pairs if isinstance(m, nn.Linear)]
    low = min(size_out, size_in)
    down = sorted(rank for rank, into in shapes if into == size_in and rank < low)
    up = sorted(rank for out, rank in shapes if out == size_out and rank < low)
    return down == up and 2 * len(down) == len(pairs)


def placement_like(parameter: torch.Tensor, weight: torch.Tensor, cut: Placement) -> Placement:
    """Return the weight's cut if a parameter has the same length there, else Replicate."""
    assert isinstance(cut, Shard)
    fits = parameter.ndim > cut.dim and parameter.shape[cut.dim] == weight.shape[cut.dim]
    return cut if fits else Replicate()


class LayerHooks:
    """The hooks before and after a layer or, while it runs, the module that wraps the layer.

    Threads:
        As the layer.
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
        """Register the hooks on a layer and its wrapper, which may be the layer itself, once.

        Raises:
            UsageError: The layer is already parallel with another style.
        """
        known: LayerHooks | None = getattr(layer, "_dure_hooks", None)
        if known is None:
            known = self
            layer._dure_hooks = self  # pyright: ignore
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer)
        elif known._style != self._style:
            raise UsageError(
                "the layer is already parallel with another style", seen=f"{known._style}"
            )
        if not hasattr(wrapper, "_dure_hooks"):
            wrapper._dure_hooks = known  # pyright: ignore
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
