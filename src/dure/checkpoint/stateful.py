"""`Stateful`: what `save` and `load` ask for its state and give it back, as torch names it."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Stateful", "StatefulT"]


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: modules, optimizers, schedulers, loaders, the user's own.

    Example:
        ```python
        from dure.checkpoint.stateful import Stateful

        class Count:
            n = 0

            def state_dict(self):
                return {"n": self.n}

            def load_state_dict(self, state_dict):
                self.n = state_dict["n"]

        assert isinstance(Count(), Stateful)
        ```
    """

    def state_dict(self) -> Any:
        """Return the state: tensors, values, dicts and lists of them."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take what `state_dict` returned."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)
"""A class that has a state."""
