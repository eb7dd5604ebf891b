"""Cutting a list of layers into stages of equal cost, without tracing the model.

A pipeline is as fast as its slowest stage. Layers stay in order, each stage has at least one, and
of all ways to cut them the one is taken whose largest stage costs least; of several such ones, the
one with the least sum of squares, which also levels the other stages.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import nn

from dure.errors import UsageError
from dure.training.pytrees import tensors_of

__all__ = ["StageCut", "cut_by_cost", "cut_into_stages", "measured_costs"]

_OP = "cut_into_stages"


@dataclass(frozen=True, slots=True)
class StageCut:
    """Layers in stages; `print` shows them.

    Attributes:
        stages: The modules, one a stage. A layer keeps the name that it had in the list.
        parts: Which layers each stage has.
        costs: Of each layer.

    Obtained from:
        `cut`.
    """

    stages: list[nn.Sequential]
    parts: list[range]
    costs: list[float]

    def __str__(self) -> str:
        """Return a line a stage: its layers, its cost, its parameters."""
        total = sum(self.costs) or 1.0
        lines = [f"stage  {'layers':24} {'cost':>8} {'share':>6} {'parameters':>12}"]
        for number, (part, stage) in enumerate(zip(self.parts, self.stages, strict=True)):
            cost = sum(self.costs[i] for i in part)
            names = [name for name, _ in stage.named_children()]
            layers = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            numel = sum(p.numel() for p in stage.parameters())
            lines.append(f"{number:5}  {layers:24} {cost:8.3g} {cost / total:6.1%} {numel:12,}")
        return "\n".join(lines)


def cut_by_cost(costs: Sequence[float], n_stages: int) -> list[range]:
    """Cut a list into `n_stages` parts in order, so that the largest sum is as small as can be.

    Args:
        costs: Of each layer, in any unit; not negative.
        n_stages: How many parts; none is empty.

    Returns:
        The layers of each part.

    Raises:
        UsageError: There are fewer layers than stages, or a cost is negative or no number.

    Cost:
        O(layers^2 n_stages) steps.

    Example:
        ```python
        from dure import pipelining

        assert pipelining.cut_by_cost([3, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]
        ```
    """
    n = len(costs)
    if not 1 <= n_stages <= n:
        raise UsageError(
            "each stage has at least one layer",
            op=_OP,
            seen=f"{n} layers, {n_stages} stages",
            fix=f"Ask for 1 to {n} stages, or cut layers further.",
        )
    wrong = [i for i, cost in enumerate(costs) if not cost >= 0 or cost == inf]
    if wrong:
        raise UsageError(
            "a cost is a number that is not negative",
            op=_OP,
            seen=f"{costs[wrong[0]]} of layer {wrong[0]}",
        )
    before = [0.0, *accumulate(costs)]
    largest, _ = _best(before, n_stages, max)
    _, parts = _best(
        before, n_stages, lambda sum, part: sum + (part**2 if part <= largest else inf)
    )
    return parts


def _best(
    before: Sequence[float], n_stages: int, add: Callable[[float, float], float]
) -> tuple[float, list[range]]:
    """Return the least value of all cuts, and that cut.

    `before` has the cost of the layers before each; `add` puts a stage's cost to the value of the
    stages before it.
    """
    n = len(before) - 1
    least = [0.0] + [inf] * n  # the value of the first i layers, cut into the stages so far
    begins: list[list[int]] = []  # for each number of stages, where the last of them begins
    for stage in range(1, n_stages + 1):
        now, begin = [inf] * (n + 1), [stage - 1] * (n + 1)
        for end in range(stage, n + 1):
            ways = [(add(least[b], before[end] - before[b]), b) for b in range(stage - 1, end)]
            now[end], begin[end] = min(ways)
        least = now
        begins.append(begin)
    parts: list[range] = []
    end = n
    for begin in reversed(begins):
        parts.append(range(begin[end], end))
        end = begin[end]
    return least[n], parts[::-1]


def measured_costs(layers: Sequence[nn.Module], *sample: Any, repeat: int = 3) -> list[float]:
    """Return the seconds of each layer's forward and backward; the least of `repeat` runs.

    Args:
        layers: Called one after another, each with what the one before returned.
        *sample: Arguments of the first layer. They are not changed: gradients are dropped.
        repeat: How often each is run.

    Returns:
        Seconds, one number per layer.

    Cost:
        `repeat` forwards and backwards of all layers, on this rank alone.

    Example:
        ```python
        layers = [torch.nn.Linear(4, 4), torch.nn.ReLU()]
        assert len(pipelining.measured_costs(layers, torch.ones(2, 4))) == 2
        ```
    """
    found: list[float] = []
    given: tuple[Any, ...] = sample
    for layer in layers:
        least = inf
        output: Any = None
        parameters = [p for p in layer.parameters() if p.requires_grad]
        for _ in range(repeat):
            fresh = tuple(_fresh(value) for value in given)
            begin = time.perf_counter()
            output = layer(*fresh)
            roots = [t for t in tensors_of(output) if t.requires_grad]
            wanted = [*parameters, *(t for t in tensors_of(fresh) if t.requires_grad)]
            if roots and wanted:
                ones = [torch.ones_like(t) for t in roots]
                torch.autograd.grad(roots, wanted, ones, allow_unused=True)
            least = min(least, time.perf_counter() - begin)
        found.append(least)
        given = output if isinstance(output, tuple) else (output,)  # pyright: ignore
    return found


def _fresh(value: Any) -> Any:
    """Return a leaf with the same values, whose gradient is asked for, as a stage's input's is."""
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def cut_into_stages(
    layers: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    n_stages: int,
    *,
    sample: Any = None,
    costs: Sequence[float] | None = None,
) -> StageCut:
    """Cut layers into stages of equal cost.

        cut = cut_into_stages([embed, *blocks, head], 4, sample=tokens)
        if rank == 0:
            print(cut)
        stage = PipelineStage(cut.stages[rank], rank, 4, device)

    Every rank must find the same cut: give all of them the same `costs`, or let one measure and
    broadcast them (`measured_costs`). Numbers of parameters, the default, are the same anywhere.

    Args:
        layers: A list, names to modules, or a module of which they are the children (a
            `Sequential`); each is called with what the one before returned.
        n_stages: How many; none is empty, no layer is lost.
        sample: The first layer's input, or a tuple of them: costs are measured with it.
        costs: Of each layer, in any unit; instead of measuring.

    Returns:
        The stages, with their layers and costs.

    Raises:
        UsageError: Fewer layers than stages; costs that do not fit; both `sample` and `costs`.

    Example:
        ```python
        layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        cut = pipelining.cut_into_stages(layers, 2)
        assert len(cut.stages) == 2
        ```
    """
    named = _named(layers)
    modules = list(named.values())
    if costs is not None and (sample is not None or len(costs) != len(modules)):
        raise UsageError(
            "costs are given, one for each layer, or measured with a sample",
            op=_OP,
            seen="both" if sample is not None else f"{len(costs)} costs, {len(modules)} layers",
        )
    if costs is None and sample is not None:
        costs = measured_costs(modules, *(sample if isinstance(sample, tuple) else (sample,)))  # pyright: ignore
    if costs is None:
        costs = [float(sum(p.numel() for p in module.parameters())) for module in modules]
    parts = cut_by_cost(costs, n_stages)
    names = list(named)
    stages = [nn.Sequential(OrderedDict((names[i], modules[i]) for i in part)) for part in parts]
    return StageCut(stages, parts, list(costs))


def _named(
    layers: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
) -> dict[str, nn.Module]:
    if isinstance(layers, nn.Module):
        return dict(layers.named_children())
    if isinstance(layers, Mapping):
        return dict(layers)
    return {str(i): layer for i, layer in enumerate(layers)}
