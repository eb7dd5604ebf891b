"""What `rpc_async` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dure.rpc.agent import Agent, Call

__all__ = ["CallFuture"]


class CallFuture(torch.futures.Future[Any]):
    """A future of torch's whose waiting thread receives messages.

    Callbacks run in a thread of RPC's that counts as one that runs a call, or in the one that
    waits.
    """

    agent: Agent
    call: Call

    def wait(self) -> Any:
        """Wait for the answer, and return the value.

        Raises:
            Exception: What the callee has raised, or what went wrong on the way.
        """
        if not self.done():
            self.agent.wait(self.call)
        return super().wait()

    def told(self, call: Call) -> None:
        """Take the outcome of the call."""
        try:
            value = self.agent.result(call)
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)
