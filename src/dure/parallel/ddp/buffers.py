"""Buffers (running statistics) are kept equal: one rank's are sent to all before a forward.

They are not averaged, but sent from rank 0, packed into one tensor per dtype, since there are many
and they are small. A hook may act in place of the broadcast, before forward or after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from dure import torch_private
from dure.training.agreement import broadcast_tensors

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["BufferHook", "BufferHookLocation", "BufferSync"]

_ROOT = 0


class BufferHookLocation(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    """Before forward, which sees its result."""
    POST_FORWARD = auto()
    """After forward; futures that it returns are waited for at the end of backward."""


BufferHook = Callable[[Any, dict[str, torch.Tensor]], Any]
"""Any: the hook's state; it returns None or a list of futures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hook:
    state: object
    call: BufferHook
    location: BufferHookLocation


class BufferSync:
    """Sends one rank's buffers to all, usually rank 0's, or has a hook do what it likes with them.

    Buffers are looked up in their modules each time: programs replace them.
    """

    def __init__(
        self, group: ProcessGroup, owners: Mapping[str, tuple[torch.nn.Module, str]]
    ) -> None:
        self._group = group
        self._owners = dict(owners)
        self._hook: _Hook | None = None

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers as they are now, by their paths."""
        found = {path: getattr(module, name, None) for path, (module, name) in self._owners.items()}
        return {path: b for path, b in found.items() if isinstance(b, torch.Tensor)}

    def register(self, state: object, hook: BufferHook, location: BufferHookLocation) -> None:
        """Have `hook(state, buffers by path)` act in place of the broadcast."""
        self._hook = _Hook(state=state, call=hook, location=location)

    @property
    def acts_after_forward(self) -> bool:
        """Whether a hook acts after forward; else buffers are seen to before."""
        hook = self._hook
        return hook is not None and hook.location is BufferHookLocation.POST_FORWARD

    def before_forward(self, root: int = _ROOT) -> None:
        """Overwrite the buffers with those of the rank `root`, or run the hook where it is due.

        Collective:
            All ranks of the group.

        Cost:
            One broadcast for all small ones of a dtype and device, and one for each large one.
        """
        if self._hook is None:
            buffers = list(self.named_buffers().values())
            with _unseen_by_autograd(buffers):
                broadcast_tensors(self._group, buffers, root)
        elif self._hook.location is BufferHookLocation.PRE_FORWARD:
            self._run_hook()

    def after_forward(self) -> list[torch.futures.Future[Any]]:
        """Run the hook, if it is due; return the futures that it gave."""
        if self._hook is None or self._hook.location is BufferHookLocation.PRE_FORWARD:
            return []
        return self._run_hook()

    def _run_hook(self) -> list[torch.futures.Future[Any]]:
        assert self._hook is not None
        buffers = self.named_buffers()
        with torch.no_grad(), _unseen_by_autograd(buffers.values()):
            return list(self._hook.call(self._hook.state, buffers) or ())


def _unseen_by_autograd(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Let `tensors` change without a mark: an earlier forward may have saved them for backward."""
    return torch_private.unsafe_preserve_version_counter(tuple(tensors))
