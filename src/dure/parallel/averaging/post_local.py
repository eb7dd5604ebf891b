"""Optimizers around an optimizer: the local one steps, then the ranks come together.

`Outer` is what they share: to a training loop, a learning rate scheduler or a checkpoint it looks
like the local optimizer, whose parameter groups and state it shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any  # Any: as in torch.optim.Optimizer

import torch

from dure.errors import UsageError, UsageWarning
from dure.parallel.averaging.averagers import ModelAverager

__all__ = ["Outer", "PostLocalSGDOptimizer"]


class Outer(torch.optim.Optimizer):
    """An optimizer that shows the groups and the state of another.

    Args:
        optim: The other: the local optimizer.

    Raises:
        UsageError: From `copy` and `pickle`, which would have to copy the process group.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        # Not Optimizer.__init__: groups and state are the other's own.
        self.optim = optim
        self.param_groups = optim.param_groups
        self.defaults = optim.defaults
        super().__setstate__({})  # the rest of an optimizer, such as places for hooks

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The local optimizer's state."""
        return self.optim.state

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled or copied: ranks that come together cannot be.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"a {type(self).__name__} can be neither copied nor pickled",
            fix="Save its state_dict(), and load it into a new one.",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the local optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state; hooks of `register_state_dict_...` run around that."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._complete_state()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`; hooks of `register_load_state_dict_...` run around that.

        Raises:
            UsageError: The state is not one of such an optimizer.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _complete_state(self) -> dict[str, Any]:
        """Return the local optimizer's state, and what is this class's own."""
        raise NotImplementedError

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `_complete_state` returned."""
        raise NotImplementedError


class PostLocalSGDOptimizer(Outer):
    """Steps locally, and averages the models when its averager says so.

    With DDP and `post_localSGD_hook`, this is post-local SGD: gradients are averaged over all ranks
    for the first steps, then within each host, and models between hosts every few steps. The hook's
    ``start_localSGD_iter`` and the averager's ``warmup_steps`` must be equal.

    Args:
        optim: The local optimizer.
        averager: Says when to average, and over which ranks.

    Collective:
        `step`, whenever the averager averages.

    Example:
        ```python
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        averager = dist.PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = dist.PostLocalSGDOptimizer(inner, averager)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make a local step, then average if it is time.

        Args:
            closure: Computes the loss again, for the optimizers that take one.

        Returns:
            The closure's loss, or None.

        Collective:
            All ranks, in the steps that average.
        """
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def _complete_state(self) -> dict[str, Any]:
        """Return the local optimizer's state, and the averager's step as ``step``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`; without ``step`` the averager restarts, with a warning."""
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "the state has no 'step' of an averager: it starts again, with its warm-up",
                UsageWarning,
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)
