"""What `rpc_async` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dure.rpc.agent import Agent
    from dure.rpc.calls import Call

__all__ = ["CallFuture"]


class CallFuture(torch.futures.Future[Any]):
    """A future of torch's whose waiting thread receives messages.

    Callbacks run in a thread of RPC's that counts as one that runs a call, or in one that waits.
    """

    agent: Agent
    call: Call

    def wait(self) -> Any:
        """Wait for the answer, and return the value.

        Raises:
            Exception: What the callee has raised, or what went wrong on the way.
        """
        if not self.done():
            self.agent.wait_until_told(self.call)
        return self.value() if self.done() else super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Any:
        """Have something done with the future when it is done; see torch."""
        self.call.quick = False
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Have something called when the future is done; see torch."""
        self.call.quick = False
        super().add_done_callback(callback)

    def told(self, call: Call) -> None:
        """Take the outcome of the call."""
        try:
            value = self.agent.result(call)
        except Exception as error:
            self._set_unwrap_func(_raise_another)
            self.set_result(error.with_traceback(None))
        else:
            self.set_result(value)


def _raise_another(error: Exception) -> None:
    """Raise an exception like the one that a future has.

    Were it raised itself, its traceback would hold the frames that hold the future, in a circle
    through C++ that Python cannot see, so that neither they nor their tensors were ever freed.
    """
    another = type(error).__new__(type(error), *error.args)
    another.__dict__.update(error.__dict__)
    another.__cause__ = error.__cause__
    raise another
