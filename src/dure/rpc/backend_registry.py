"""Backends by name, as torch has them; there is one, and programs may add others."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from dure.errors import RpcError
from dure.rpc.options import TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """What a backend is made of."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any] | None


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


BackendType: Any = enum.Enum("BackendType", {"TENSORPIPE": BackendValue(_options, None)})
"""The backends. It is another enumeration after `register_backend`."""


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
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
    BackendType = enum.Enum("BackendType", known | {backend_name: value})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = 60.0, init_method: str = "env://", **kwargs: Any
) -> Any:
    """Return options for a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the agent of a backend that a program has registered."""
    return backend.value.init_backend_handler(*args, **kwargs)
