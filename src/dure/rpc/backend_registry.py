"""What `init_rpc` can be told: options, and backends by name, as torch has them.

There is one backend, and programs may add others.
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
    """Options of any backend.

    Args:
        rpc_timeout: Of calls that give none, in seconds; 0 is none.
        init_method: Where the workers meet: `env://`, `tcp://HOST:PORT`, `file:///PATH`.
    """

    def __init__(self, rpc_timeout: float = 60.0, init_method: str | None = "env://") -> None:
        if not isinstance(rpc_timeout, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is a number of seconds, "
                f"not {rpc_timeout!r}"
            )
        check_seconds(rpc_timeout, "RpcBackendOptions")
        check(
            init_method,
            str | None,
            "an `init_method` is a string",
            op="RpcBackendOptions",
            fix="Write env://, tcp://HOST:PORT or file:///PATH.",
        )
        self.rpc_timeout, self.init_method = float(rpc_timeout), init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of the backend that there is; the name is torch's.

    Args:
        num_worker_threads: How many calls of others run at a time; those that wait for another call
            do not count.
        rpc_timeout: Of calls that give none, in seconds; 0 is none.
        init_method: Where the workers meet: `env://`, `tcp://HOST:PORT`, `file:///PATH`.
        device_maps: For each callee, by name, where tensors of this process's devices belong.
        devices: Accepted; all devices may be used.
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
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "at least one thread runs calls",
                seen=repr(num_worker_threads),
                fix="Give a whole number of threads.",
            )
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Say where tensors of this process's devices belong at the worker `to`.

        Raises:
            UsageError: Two devices belong to one, or a device would belong to two.
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
        """Say which devices of this process calls use.

        Raises:
            UsageError: One is no CUDA device.
        """
        self.devices = [torch.device(device) for device in devices]
        for device in self.devices:
            if device.type != "cuda":
                raise UsageError("`set_devices` expect a list of CUDA devices", seen=str(device))


class BackendValue(NamedTuple):
    """What a backend is made of."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any] | None


def _options(
    rpc_timeout: float, init_method: str | None, **kwargs: Any
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


class BackendType(enum.Enum):
    """The backends. It is another enumeration after `register_backend`."""

    TENSORPIPE = BackendValue(_options, None)


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Add a backend, and return its type.

    Args:
        backend_name: Its name.
        construct_rpc_backend_options_handler: Called with timeout, init_method and others; returns
            options.
        init_backend_handler: Called with store, name, rank, world size and options; returns the
            agent.

    Raises:
        RpcError: There is one of that name.
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
    """Return options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)
