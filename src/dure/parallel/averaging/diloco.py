"""DiLoCo: many local steps, then one step of an outer optimizer with what the ranks have moved.

All ranks begin a *round* at the same parameters, the *anchor*. Each makes `period` steps of its own
optimizer on its own data. Then, with x the parameters it came to,

    g = mean over ranks of (anchor - x)      the outer gradient, one all_reduce
    anchor = outer optimizer's step with g   by default SGD with Nesterov momentum
    x = anchor                               and the next round begins

With an outer learning rate of 1 and no momentum this is averaging of models. The momentum is what
makes hundreds of local steps as good as steps that communicate.

*Fragments* spread the communication: with k of them each has its own rounds of `period` steps, and
their ends are period / k steps apart, so that a step sends at most 1/k of the model.

Source: Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105, and Streaming DiLoCo,
https://arxiv.org/abs/2501.18512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.world import resolve
from dure.errors import UsageError
from dure.parallel.averaging.packing import average_
from dure.parallel.averaging.post_local import Outer

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["DiLoCo"]

_OUTER_DEFAULTS: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class _Fragment:
    """Some parameters, their anchor, and the outer optimizer that moves it."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        self.anchor = [p.detach().clone() for p in parameters]
        self.outer = make(self.anchor)

    @torch.no_grad()
    def end_round(self, group: ProcessGroup, dtype: torch.dtype | None) -> None:
        """Move the anchor by what the ranks have moved, and begin the next round there."""
        moved = [a - p for a, p in zip(self.anchor, self.parameters, strict=True)]
        average_(moved, group, dtype)
        for anchor, gradient in zip(self.anchor, moved, strict=True):
            anchor.grad = gradient
        self.outer.step()
        self.outer.zero_grad()
        self.begin_round()

    @torch.no_grad()
    def begin_round(self) -> None:
        """Put the parameters at the anchor."""
        for anchor, parameter in zip(self.anchor, self.parameters, strict=True):
            parameter.copy_(anchor)


class DiLoCo(Outer):
    """Steps locally; every `period` steps an outer optimizer steps with the ranks' mean movement.

    Use it without DDP, or with DDP inside each host only. At construction all ranks take rank 0's
    parameters.

    Args:
        optim: The local ("inner") optimizer; its state stays with each rank.
        period: Local steps in a round.
        outer_optimizer_class: Any torch optimizer.
        process_group: The ranks; all by default.
        fragments: Into how many parts the parameters are divided, whose rounds end in turn.
        dtype: Of messages; None is the parameters' own. bfloat16 halves the bytes of float32.
        **outer: Options of the outer optimizer; for SGD, lr 0.7 with Nesterov momentum 0.9.

    Attributes:
        num_steps: Local steps so far.

    Raises:
        UsageError: `period` or `fragments` is not positive, or there are more fragments than
            parameters or steps in a round.

    Collective:
        Construction; every step at which a round ends.

    Cost:
        S bytes of parameters in all_reduces of 32 MiB every `period` steps; memory for the anchor
        and the outer optimizer's state (twice the parameters by default).

    Numerics:
        After the end of a round all ranks have bitwise the same parameters.

    Example:
        ```python
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = dist.DiLoCo(inner, period=2)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()  # every second one communicates
            optimizer.zero_grad()
        ```
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        period: int,
        outer_optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
        process_group: ProcessGroup | None = None,
        fragments: int = 1,
        dtype: torch.dtype | None = None,
        **outer: Any,
    ) -> None:
        super().__init__(optim)
        parameters = [p for group in optim.param_groups for p in group["params"]]
        if not 1 <= fragments <= min(period, len(parameters)):
            raise UsageError(
                "a round needs at least one step, and each fragment a step and a parameter",
                seen=f"period={period}, fragments={fragments}, {len(parameters)} parameters",
            )
        self.period, self.dtype, self.num_steps = period, dtype, 0
        self.process_group = resolve(process_group, "DiLoCo")
        if not outer and outer_optimizer_class is torch.optim.SGD:
            outer = _OUTER_DEFAULTS
        with torch.no_grad():
            for parameter in parameters:
                self.process_group.broadcast(parameter.detach(), 0)
        self._fragments = [
            _Fragment(part, lambda anchor: outer_optimizer_class(anchor, **outer))
            for part in _divided(parameters, fragments)
        ]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make a local step; end the round of a fragment if it is due.

        Args:
            closure: Computes the loss again, for the optimizers that take one.

        Returns:
            The closure's loss, or None.

        Collective:
            All ranks, in the steps that end a round.
        """
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.num_steps += 1
        for i, fragment in enumerate(self._fragments):
            early = i * self.period // len(self._fragments)
            if (self.num_steps + early) % self.period == 0:
                fragment.end_round(self.process_group, self.dtype)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the anchor is made once.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "DiLoCo cannot take parameters later",
            fix="Add them to the local optimizer before wrapping it.",
        )

    def _complete_state(self) -> dict[str, Any]:
        """Return the local state, and under ``diloco`` anchors, outer states and the count."""
        rounds = [{"anchor": f.anchor, "outer": f.outer.state_dict()} for f in self._fragments]
        return {
            **self.optim.state_dict(),
            "diloco": {"num_steps": self.num_steps, "fragments": rounds},
        }

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, in the middle of a round too; the model is loaded by itself.

        Raises:
            UsageError: The state is not one of DiLoCo with as many fragments.
        """
        own = state_dict.get("diloco")
        if own is None or len(own["fragments"]) != len(self._fragments):
            raise UsageError(
                "this is not a state of DiLoCo with as many fragments",
                seen="no 'diloco' in it" if own is None else f"{len(own['fragments'])} fragments",
                fix=f"Load one that was saved with fragments={len(self._fragments)}.",
            )
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups
        self.num_steps = own["num_steps"]
        for fragment, saved in zip(self._fragments, own["fragments"], strict=True):
            for anchor, value in zip(fragment.anchor, saved["anchor"], strict=True):
                anchor.copy_(value)
            fragment.outer.load_state_dict(saved["outer"])


def _divided(
    parameters: Sequence[torch.nn.Parameter], parts: int
) -> list[list[torch.nn.Parameter]]:
    """Divide parameters, in their order, into parts of about equal size; none is empty."""
    left, remaining = list(parameters), sum(p.numel() for p in parameters)
    divided: list[list[torch.nn.Parameter]] = []
    for i in range(parts, 0, -1):
        share, part = remaining / i, list[torch.nn.Parameter]()
        size = 0
        while left and (not part or (size + left[0].numel() / 2 < share and len(left) >= i)):
            size += left[0].numel()
            part.append(left.pop(0))
        if i == 1:
            part += left
        remaining -= size
        divided.append(part)
    return divided
