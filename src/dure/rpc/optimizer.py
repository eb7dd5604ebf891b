"""One optimizer over parameters of several processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from dure.errors import UsageError
from dure.rpc import api
from dure.rpc.autograd.api import get_gradients
from dure.rpc.autograd.backward import inside
from dure.rpc.autograd.graph import with_grads
from dure.rpc.names import WorkerInfo
from dure.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """An optimizer of parameters that other processes own; each owner updates its own.

    Several distributed optimizers may be made over the same parameters, by one process or many;
    each has its own state, and their steps at an owner run one after another. Nothing else is
    ordered: one program's step may run between the forward and the backward pass of another.

    Args:
        optimizer_class: A class of `torch.optim`, or a similar class that all owners can import. If
            it has the option `foreach`, that is set, unless `kwargs` selects an implementation.
        params_rref: References to the parameters.
        args: Arguments of the class, after the parameters.
        kwargs: Keyword arguments of the class.

    Raises:
        UsageError: An element of `params_rref` is not a reference.
        PeerLost: An owner is gone.
        Exception: Raised by `optimizer_class` at an owner.

    Attributes:
        remote_optimizers: References to the optimizers, one per owner.

    Cost:
        One call per owner, all at once.

    Example:
        ```python
        weight = rpc.remote(f"worker{1 - rank}", torch.nn.Parameter, (torch.ones(2),))
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        with autograd.context() as context_id:
            loss = weight.to_here().sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        assert weight.to_here().tolist() == [0.5, 0.5]
        ```
    """

    def __init__(
        self,
        optimizer_class: type[Any],
        params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        owners: dict[WorkerInfo, list[RRef[Any]]] = {}
        for rref in params_rref:
            if not isinstance(rref, RRef):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    "params_rref must contain references to parameters",
                    op="DistributedOptimizer",
                    seen=repr(rref),
                    fix="Make them with rpc.remote, RRef(parameter) or remote_parameters().",
                )
            owners.setdefault(rref.owner(), []).append(rref)
        sent = optimizer_class, args, kwargs
        self.remote_optimizers: list[RRef[_LocalOptimizer]] = _all(
            [api.rpc_async(owner, _make, (rrefs, *sent)) for owner, rrefs in owners.items()]
        )

    def step(self, context_id: int) -> None:
        """Update all parameters by the gradients of a context, at all owners in parallel.

        Parameters without a gradient in the context do not change. `.grad` is not changed.

        Args:
            context_id: The context.

        Raises:
            TypeError: `context_id` is not an int.
            RpcError: The context does not exist.
            PeerLost: An owner is gone.
            Exception: Raised by the optimizer of an owner; the others have made their steps.

        Cost:
            One call per owner, all at once.
        """
        get_gradients(context_id)  # raises if the context does not exist
        with inside(context_id):  # so that all owners know the context
            _all(
                [
                    api.rpc_async(rref.owner(), _step, (rref, context_id))
                    for rref in self.remote_optimizers
                ]
            )


class _LocalOptimizer:
    """The optimizer of one owner."""

    def __init__(
        self,
        rrefs: list[RRef[torch.Tensor]],
        optimizer_class: type[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        known = inspect.signature(optimizer_class).parameters
        if "foreach" in known and not {"foreach", "fused", "differentiable"} & kwargs.keys():
            kwargs = kwargs | {"foreach": True}
        self.parameters = [rref.local_value() for rref in rrefs]
        self.optimizer = optimizer_class(self.parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        gradients = get_gradients(context_id)
        given = [gradients.get(parameter) for parameter in self.parameters]
        with_grads(self.parameters, given, self.optimizer.step)


def _make(
    rrefs: list[RRef[torch.Tensor]],
    optimizer_class: type[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[_LocalOptimizer]:
    return RRef(_LocalOptimizer(rrefs, optimizer_class, args, kwargs))


def _step(rref: RRef[_LocalOptimizer], context_id: int) -> None:
    optimizer = rref.local_value()
    if not isinstance(optimizer, _LocalOptimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "expected an optimizer of DistributedOptimizer",
            op="DistributedOptimizer",
            seen=repr(optimizer),
        )
    optimizer.step(context_id)


def _all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """Wait for all futures; then raise the first error."""
    for future in futures:
        with suppress(Exception):
            future.wait()
    return [future.value() for future in futures]
