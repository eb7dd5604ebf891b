"""The public functions of distributed autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.errors import RpcError
from dure.rpc import current as agents
from dure.rpc.autograd import backward as passes
from dure.rpc.autograd.backward import Context, Contexts

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether distributed autograd is available: always True.

    Returns:
        True.

    Example:
        ```python
        assert autograd.is_available()
        ```
    """
    return True


class context:
    """Record the remote calls of a block, so that gradients can flow through them.

    `with context() as context_id:` applies to the calling thread, to the calls that it makes, and
    to the calls that these make, on all processes. At the end of the block all processes forget the
    context and its gradients. A thread is in at most one context; a process may have many.

    Returns:
        The context's id, an int, for `backward`, `get_gradients` and `DistributedOptimizer.step`.

    Raises:
        RpcError: The thread is in a context already, or RPC has not been initialized.

    Cost:
        No message at the start; at the end one to each process that knows the context.

    Example:
        ```python
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(f"worker{1 - rank}", torch.mul, (x, 3)).sum()
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]
        assert x.grad is None
        ```
    """

    def __enter__(self) -> int:
        self._number = _new_context().number
        return self._number

    def __exit__(self, *error: object) -> None:
        _release_context(self._number)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute gradients of losses through all processes of a context, and store them in it.

    All calls of the context take part, as in torch's FAST mode: each result that needs gradients
    must contribute to the losses. `.grad` is not changed. The gradients of several passes are
    added. After a pass that does not retain the graph, the context can be used for new calls.

    Args:
        context_id: The context, of this process or another.
        roots: Losses with one element each, computed in this process.
        retain_graph: Whether to keep the graph for another pass.

    Raises:
        TypeError: An argument has the wrong type.
        RpcError: The context does not exist; a root cannot be differentiated; the pass failed in
            another process, whose traceback is in the error; the result of a call got no gradient,
            and the error names the call.
        PeerLost: A process that takes part is gone.
        Exception: Raised by this process's part of the pass.

    Cost:
        Each process runs its part of the graph once. For each message of the forward pass whose
        tensors need gradients, one message with gradients is sent back; for each chain of them that
        does not end here, a short one to this process.

    Example:
        ```python
        w = rpc.remote(f"worker{1 - rank}", torch.ones, (2,), {"requires_grad": True})
        with autograd.context() as context_id:
            autograd.backward(context_id, [w.to_here().sum()])  # the gradient is at w's owner
        ```
    """
    if not _is_number(context_id) or not isinstance(roots, Sequence):
        raise TypeError(
            "backward(): incompatible function arguments: expected (context_id: int, "
            f"roots: list of tensors, retain_graph: bool), got {context_id!r}, {roots!r}"
        )
    _check_roots(roots)
    _contexts().backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return a context's gradients of tensors of this process.

    Args:
        context_id: The context.

    Returns:
        For each leaf of this process that got one, its gradient, which has the leaf's shape. The
        gradients are not copied.

    Raises:
        TypeError: `context_id` is not an int.
        RpcError: The context does not exist.

    Example:
        ```python
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            autograd.backward(context_id, [x.sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [1.0, 1.0]
        ```
    """
    if not _is_number(context_id):
        raise TypeError(
            "get_gradients(): incompatible function arguments: expected (context_id: int), "
            f"got {context_id!r}"
        )
    return dict(_contexts().find(context_id).gradients)


def _is_number(context_id: object) -> bool:
    """Whether this may be the number of a context: True is none, although it equals 1."""
    return isinstance(context_id, int) and not isinstance(context_id, bool)


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise RpcError("No tensors provided for gradient computation", op="backward")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"backward(): incompatible function arguments: {root!r} is not a tensor"
            )
        seen = ""
        if not root.requires_grad:
            seen = "requires_grad not set on"
        elif root.numel() != 1:
            seen = "is not a scalar, all roots need to be scalar"
        elif root.grad_fn is None:
            seen = "does not have a valid gradient function"
        if seen:
            raise RpcError(f"a root cannot be differentiated: {seen}", op="backward")


# --- torch's private names, and its name of the class ----------------------------------------


DistAutogradContext = Context


def _contexts() -> Contexts:
    return agents.current().gradients


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
            fix="Use `with dure.autograd.context() as context_id:`.",
        )
    return _retrieve_context(number)


def _retrieve_context(context_id: int) -> Context:
    return _contexts().find(context_id)


def _release_context(context_id: int) -> None:
    """Forget a context on all processes; if the calling thread is in it, it leaves it."""
    contexts = _contexts()
    contexts.find(context_id)
    if passes.current() == context_id:
        passes.set_current(None)
    contexts.release(context_id)


_is_valid_context = _retrieve_context


def _get_debug_info() -> dict[str, int]:  # pyright: ignore[reportUnusedFunction]
    """Return the numbers of contexts, and of contexts in which a backward pass runs."""
    contexts, steps = _contexts().counts
    return {"num_autograd_contexts": contexts, "num_current_backward_passes": steps}


def _get_max_id() -> int:  # pyright: ignore[reportUnusedFunction]
    return _contexts().max_number
