"""Options of `init_rpc`, and backends by name, as in torch.

Dure has one backend; programs may register others.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.errors import RpcError, UsageError
from dure.rpc.checks import check, check_seconds
from dure.torch_names import lazy_names

__all__ = [
    "BackendType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "register_backend",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)

Device = int | str | torch.device


class RpcBackendOptions:
    """Options that all backends have.

    Args:
        rpc_timeout: The timeout of calls that specify none, in seconds; 0 for none.
        init_method: Where the workers meet: `env://`, `tcp://HOST:PORT` or `file:///PATH`.

    Raises:
        TypeError: `rpc_timeout` is not a number.
        UsageError: `rpc_timeout` is negative, or `init_method` is not a string.

    Example:
        ```python
        options = rpc.RpcBackendOptions(rpc_timeout=10.0)
        assert options.init_method == "env://"
        ```
    """

    def __init__(self, rpc_timeout: float = 60.0, init_method: str | None = "env://") -> None:
        if not isinstance(rpc_timeout, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "incompatible constructor arguments: rpc_timeout must be a number of seconds, "
                f"got {rpc_timeout!r}"
            )
        check_seconds(rpc_timeout, "RpcBackendOptions")
        check(
            init_method,
            str | None,
            "init_method must be a string or None",
            op="RpcBackendOptions",
            fix="Write env://, tcp://HOST:PORT or file:///PATH.",
        )
        self.rpc_timeout, self.init_method = float(rpc_timeout), init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of Dure's backend, which has torch's name.

    Args:
        num_worker_threads: How many calls of others run at a time; calls that wait for another call
            do not count.
        rpc_timeout: The timeout of calls that specify none, in seconds; 0 for none.
        init_method: Where the workers meet: `env://`, `tcp://HOST:PORT` or `file:///PATH`.
        device_maps: For each callee, by name, the callee's device for each device of this process.
        devices: Accepted for torch; all devices may be used.

    Raises:
        TypeError: `rpc_timeout` is not a number.
        UsageError: Another argument is invalid.

    Example:
        ```python
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=10.0)
        options.set_device_map("worker1", {"cuda:0": "cuda:1"})
        assert options.device_maps["worker1"][torch.device("cuda:0")] == torch.device("cuda:1")
        ```
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = 60.0,
        init_method: str | None = "env://",
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: object = None,
        _channels: object = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        fix = "Pass the number of threads that run calls."
        what = "num_worker_threads must be an int of 1 or more"
        check(num_worker_threads, int, what, op="RpcBackendOptions", fix=fix)
        if num_worker_threads < 1:
            raise UsageError(what, op="RpcBackendOptions", seen=str(num_worker_threads), fix=fix)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Set the devices of a worker to which tensors of this process's devices are sent.

        Args:
            to: The worker's name.
            device_map: For each device of this process, the worker's device.

        Raises:
            UsageError: Two devices map to one, or one device to two.
        """
        known = self.device_maps.setdefault(to, {})
        for here, there in device_map.items():
            source, target = torch.device(here), torch.device(there)
            others = [device for device, other in known.items() if other == target]
            if others not in ([], [source]):
                raise UsageError(
                    "`device_map` only supports 1-to-1 mapping",
                    seen=f"{source} and {others[0]} to {target}",
                )
            if known.get(source, target) != target:
                raise UsageError(
                    "`set_device_map` only supports 1-to-1 mapping",
                    seen=f"{source} to {known[source]} and {target}",
                )
            known[source] = target

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Set the devices of this process that calls use.

        Args:
            devices: CUDA devices.

        Raises:
            UsageError: One is not a CUDA device.
        """
        self.devices = [torch.device(device) for device in devices]
        for device in self.devices:
            if device.type != "cuda":
                raise UsageError("`set_devices` expect a list of CUDA devices", seen=str(device))


class BackendValue(NamedTuple):
    """The two functions of a backend; the arguments of `register_backend`.

    Obtained from:
        `BackendType.TENSORPIPE.value` and other members of `BackendType`.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any] | None


def _options(
    rpc_timeout: float, init_method: str | None, **kwargs: Any
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


class BackendType(enum.Enum):
    """The backends, by name. After `register_backend`, `rpc.BackendType` is a new enumeration.

    Example:
        ```python
        assert rpc.BackendType.TENSORPIPE.name == "TENSORPIPE"
        ```
    """

    TENSORPIPE = BackendValue(_options, None)


def backend_registered(backend_name: str) -> bool:
    """Whether a backend is registered.

    Args:
        backend_name: Its name.

    Returns:
        Whether `BackendType` has this member.

    Example:
        ```python
        assert rpc.backend_registered("TENSORPIPE")
        ```
    """
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Register a backend.

    Args:
        backend_name: Its name.
        construct_rpc_backend_options_handler: Called with timeout, init_method and other keyword
            arguments; returns options.
        init_backend_handler: Called by `init_rpc` with store, name, rank, world size and options;
            returns the agent.

    Returns:
        The member of the new `BackendType`.

    Raises:
        RpcError: A backend of that name is registered.

    Example:
        ```python
        made = rpc.register_backend("MINE", rpc.RpcBackendOptions, lambda *arguments: None)
        assert rpc.construct_rpc_backend_options(made, rpc_timeout=5.0).rpc_timeout == 5.0
        ```
    """
    global BackendType
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    known = {member.name: member.value for member in BackendType}
    BackendType = enum.Enum("BackendType", known | {backend_name: value})  # pyright: ignore
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = 60.0,
    init_method: str | None = "env://",
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return options for a backend.

    Args:
        backend: A member of `BackendType`.
        rpc_timeout: The timeout of calls that specify none, in seconds; 0 for none.
        init_method: Where the workers meet.
        kwargs: Other options of the backend.

    Returns:
        What the backend's `construct_rpc_backend_options_handler` returns.

    Example:
        ```python
        backend = rpc.BackendType.TENSORPIPE
        options = rpc.construct_rpc_backend_options(backend, num_worker_threads=4)
        assert options.num_worker_threads == 4
        ```
    """
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)
