"""Distributed autograd, as programs use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.errors import RpcError
from dure.rpc import current as agents
from dure.rpc.autograd import backward as passes
from dure.rpc.autograd.backward import Context, Contexts

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether there is distributed autograd: always."""
    return True


class context:
    """`with context() as context_id:` gradients of remote calls made within can be computed.

    A context is this thread's, and that of the calls that it makes, and that these make, on all
    processes. At its end all of them forget it, with the gradients in it. A thread is in one
    context at a time; there can be many at once.

    Raises:
        RpcError: The thread is in a context, or RPC has not been initialized.
    """

    def __enter__(self) -> int:
        self._number = _new_context().number
        return self._number

    def __exit__(self, *error: object) -> None:
        _release_context(self._number)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of losses over all processes of a context, and keep them in it.

    All calls that were made in the context take part, as in torch's FAST mode: each result that
    needs gradients must have a part in the losses. `.grad` is not touched. Several passes of one
    context add up. After one that does not retain the graph, the context can be used for new calls.

    Args:
        context_id: The context, of this process or another.
        roots: Losses, of one element each, computed in this process.
        retain_graph: Whether there will be another pass through the same graph.

    Raises:
        TypeError: The arguments are of other types.
        RpcError: There is no such context; a root is no loss; something failed in the backward
            pass of another process, whose traceback the error has; a call's result got no
            gradient, and the error names it.
        PeerLost: A process that takes part is gone.
        Exception: What was raised in the part of the pass that is in this process.

    Cost:
        Each process that takes part runs its part of the graph once; for each message of the
        forward pass that needs gradients, one with gradients goes back, and a short answer.
    """
    if not isinstance(context_id, int) or not isinstance(roots, Sequence):
        raise TypeError(
            "backward(): incompatible function arguments: expected (context_id: int, "
            f"roots: list of tensors, retain_graph: bool), got {context_id!r}, {roots!r}"
        )
    _check_roots(roots)
    _contexts().backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of a context that belong to tensors of this process.

    Args:
        context_id: The context.

    Returns:
        For each leaf that got one, its gradient, of the same shape; shared with the context.

    Raises:
        RpcError: There is no such context.
    """
    return dict(_contexts().find(context_id).gradients)


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise RpcError("No tensors provided for gradient computation", op="backward")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"backward(): incompatible function arguments: {root!r} is no tensor")
        seen = ""
        if not root.requires_grad:
            seen = "requires_grad not set on"
        elif root.numel() != 1:
            seen = "is not a scalar, all roots need to be scalar"
        elif root.grad_fn is None:
            seen = "does not have a valid gradient function"
        if seen:
            raise RpcError(f"a root cannot be differentiated: {seen}", op="backward")


# --- torch's private names, and the class as torch calls it ----------------------------------


DistAutogradContext = Context


def _contexts() -> Contexts:
    contexts = agents.current().gradients
    if not isinstance(contexts, Contexts):
        raise RpcError("this process has no contexts", fix="Call dure.rpc.init_rpc first.")
    return contexts


def _new_context() -> Context:
    if passes.current() is not None:
        raise RpcError(
            "Already have an autograd context id for this thread", seen=str(passes.current())
        )
    made = _contexts().new()
    passes.set_current(made.number)
    return made


def _current_context() -> Context:  # pyright: ignore[reportUnusedFunction]
    number = passes.current()
    if number is None:
        raise RpcError(
            "Current thread doesn't have a valid autograd context",
            fix="Write `with dure.autograd.context() as context_id:` around it.",
        )
    return _retrieve_context(number)


def _retrieve_context(context_id: int) -> Context:
    return _contexts().find(context_id)


def _release_context(context_id: int) -> None:
    """Forget a context on all processes; a thread in it leaves it."""
    contexts = _contexts()
    contexts.find(context_id)
    if passes.current() == context_id:
        passes.set_current(None)
    contexts.release(context_id)


_is_valid_context = _retrieve_context


def _get_debug_info() -> dict[str, int]:  # pyright: ignore[reportUnusedFunction]
    """Return how many contexts there are, and parts of backward passes that are under way."""
    contexts, steps = _contexts().counts
    return {"num_autograd_contexts": contexts, "num_current_backward_passes": steps}


def _get_max_id() -> int:  # pyright: ignore[reportUnusedFunction]
    return _contexts().max_number
