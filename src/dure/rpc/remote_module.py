"""A module that another process owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dure.errors import RpcError, UsageError
from dure.rpc import api
from dure.rpc.current import current, is_set
from dure.rpc.rref import RRef
from dure.torch_private import pytree

__all__ = ["RemoteModule"]


class RemoteModule(torch.nn.Module):
    """A module that another process owns; `forward` runs there.

    In a context of distributed autograd gradients flow through it. It may be sent to other
    processes by RPC, as a reference, and not pickled otherwise. Of the other methods of modules,
    `train` and `eval` work; those that need the parameters in this process raise `ValueError`.

    Args:
        remote_device: The worker and its device: "worker1/cpu", "rank:1/cuda:0", or "worker1" for
            its CPU.
        module_cls: Called there to make the module.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        UsageError: `remote_device` does not have that form.
        RpcError: RPC has not been initialized, or there is no such worker.
        PeerLost: The worker is gone.

    Attributes:
        on: The worker's name or rank.
        device: The device there; tensors passed to `forward` are moved to it.
        module_rref: The reference to the module.

    Cost:
        One call; errors of `module_cls` are raised by the first use of the module.

    Example:
        ```python
        layer = RemoteModule(f"worker{1 - rank}/cpu", torch.nn.Linear, (4, 2))
        assert layer(torch.ones(3, 4)).shape == (3, 2)
        assert layer.forward_async(torch.ones(3, 4)).wait().shape == (3, 2)
        assert len(layer.remote_parameters()) == 2  # weight and bias
        ```
    """

    on: str | int
    device: str
    module_rref: RRef[torch.nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.on, self.device = _parse(remote_device)
        sent = module_cls, tuple(args or ()), dict(kwargs or {}), self.device
        self.module_rref = api.remote(self.on, _make, sent)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[torch.nn.Module]
    ) -> RemoteModule:
        """Return a remote module for a module that exists already.

        Args:
            remote_device: The worker and device of the module, as in the constructor.
            module_rref: The reference to it.

        Returns:
            The remote module.

        Raises:
            UsageError: `remote_device` does not have the form of the constructor's.
            RpcError: RPC has not been initialized.
        """
        return _again(*_parse(remote_device), module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `forward` in its process, with copies of the arguments.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            A copy of the result.

        Raises:
            Exception: Raised by `forward`, or by `module_cls`.
            PeerLost: The process is gone.
            RpcError: As for `rpc.rpc_sync`.

        Cost:
            One call.
        """
        return self._call(api.rpc_sync, _forward, self.device, args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Start the module's `forward` in its process, and return a future of the result.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            A future of a copy of the result; its `wait` raises the errors of `forward`.

        Cost:
            One call.
        """
        return self._call(api.rpc_async, _forward, self.device, args, kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Return references to the parameters, for `DistributedOptimizer`.

        Args:
            recurse: Whether to include the parameters of submodules.

        Returns:
            A reference per parameter, in the order of `torch.nn.Module.parameters`.

        Cost:
            One call.
        """
        return self._call(api.rpc_sync, _parameters, recurse)

    def get_module_rref(self) -> RRef[torch.nn.Module]:
        """Return the reference to the module.

        Returns:
            The attribute `module_rref`.
        """
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Put the module into training mode or evaluation mode.

        Args:
            mode: True for training mode.

        Returns:
            This object.

        Cost:
            One call.
        """
        self._call(api.rpc_sync, _train, mode)
        return self

    def eval(self) -> RemoteModule:
        """Put the module into evaluation mode, as `train(False)`.

        Returns:
            This object.
        """
        return self.train(False)

    def _call(self, way: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the module, at its owner."""
        return way(self.module_rref.owner(), function, (self.module_rref, *args))

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A reference in it can only be pickled for RPC, so this can't be pickled for anything else.
        return _again, (self.on, self.device, self.module_rref)


def _not_supported(name: str) -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        fix = ". Please use ``remote_parameters`` instead." if name == "parameters" else ""
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{fix}")

    method.__name__ = name
    method.__doc__ = "Raise `ValueError`: the module is in another process."
    return method


_NOT_SUPPORTED = """
    add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu
    load_state_dict modules named_buffers named_children named_modules named_parameters parameters
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_parameter requires_grad_ share_memory state_dict to type xpu zero_grad
"""

for _name in _NOT_SUPPORTED.split():
    setattr(RemoteModule, _name, _not_supported(_name))


def _parse(remote_device: str) -> tuple[str | int, str]:
    """Return worker and device."""
    if not is_set():
        raise RpcError("RPC has not been initialized", fix="Call dure.rpc.init_rpc first.")
    worker, _, device = str(remote_device).partition("/")
    rank = worker.removeprefix("rank:")
    try:
        on = int(rank) if rank != worker else worker
        device = str(torch.device(device or "cpu"))
    except (ValueError, RuntimeError):
        on = ""
    if on == "" or not isinstance(remote_device, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "remote_device must name a worker and a device",
            op="RemoteModule",
            seen=repr(remote_device),
            fix="Write '<worker name>/<device>' or 'rank:<rank>/<device>'.",
        )
    return on, device


# --- functions that run at the owner --------------------------------------------------------


def _again(on: str | int, device: str, module_rref: RRef[torch.nn.Module]) -> RemoteModule:
    made = RemoteModule.__new__(RemoteModule)
    torch.nn.Module.__init__(made)
    made.on, made.device, made.module_rref = on, device, module_rref
    return made


def _make(
    module_cls: Callable[..., torch.nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
) -> torch.nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it "
            f"returns an instance of {type(module)}."
        )
    return module.to(device)


def _method(module_rref: RRef[torch.nn.Module], name: str) -> Callable[..., Any]:
    return current().method(module_rref.local_value(), name)


def _forward(
    module_rref: RRef[torch.nn.Module],
    device: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    forward = _method(module_rref, "forward")
    if device != "cpu":
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))
    return forward(*args, **kwargs)


def _parameters(module_rref: RRef[torch.nn.Module], recurse: bool) -> list[RRef[Any]]:
    return [RRef(parameter) for parameter in _method(module_rref, "parameters")(recurse)]


def _train(module_rref: RRef[torch.nn.Module], mode: bool) -> None:
    _method(module_rref, "train")(mode)
