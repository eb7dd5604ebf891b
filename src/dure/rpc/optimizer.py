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
    """An optimizer of parameters that are references, in any processes.

    Each owner has an optimizer of its parameters. Several of these may be made over the same
    parameters, by one process or many; each has its own state, and their steps at an owner take
    turns. Nothing else is ordered: one program's step may come between the forward and the backward
    pass of another.

    Args:
        optimizer_class: A class of `torch.optim`, or one like them that all owners have. Those
            that know `foreach` get `foreach=True`, if nothing else is said.
        params_rref: References to the parameters.
        args: For the class, after the parameters.
        kwargs: The same.

    Raises:
        UsageError: What is optimized is not a reference.
        PeerLost: An owner is gone.
        Exception: What making the optimizer has raised at an owner.

    Attributes:
        remote_optimizers: References to the optimizers, one an owner.

    Cost:
        A call to each owner, all at once.
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
                    "a distributed optimizer takes references to parameters",
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
        """Let all owners update their parameters by the gradients of a context, in parallel.

        Parameters without a gradient there stay as they are. `.grad` is not touched.

        Args:
            context_id: The context.

        Raises:
            RpcError: There is no such context.
            PeerLost: An owner is gone.
            Exception: What an owner's optimizer has raised; the others have made their steps.

        Cost:
            A call to each owner.
        """
        get_gradients(context_id)  # is there such a context?
        with inside(context_id):  # also owners that had no part in it know it then
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
        raise UsageError("this is no optimizer", op="DistributedOptimizer", seen=repr(optimizer))
    optimizer.step(context_id)


def _all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """Wait for all; then raise the first error."""
    for future in futures:
        with suppress(Exception):
            future.wait()
    return [future.value() for future in futures]
