"""torch's path `torch.distributed.rpc`: remote calls and remote references between processes.

    from dure import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
    rpc.shutdown()

A call (`caller`) is packed (`message`) and carried (`transport`: rings and shared memory within a
host, sockets between hosts), run by a thread of the callee (`callee`, `workers`) if that is allowed
(`allow`), and answered. Values stay at their owner while a process refers to them (`references`).

Names are imported when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dure.torch_names import lazy_names

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.rpc.api": (
        "_all_gather",
        "_barrier",
        "_get_debug_info",
        "_is_current_rpc_agent_set",
        "_rref_context_get_debug_info",
        "_set_rpc_timeout",
        "_wait_all",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "is_available",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    ),
    "dure.rpc.backend_registry": (
        "BackendValue",
        "RpcBackendOptions",
        "TensorPipeRpcBackendOptions",
        "backend_registered",
        "construct_rpc_backend_options",
        "register_backend",
    ),
    "dure.rpc.memory": ("share",),
    "dure.rpc.names": ("WorkerInfo",),
    "dure.rpc.rref": ("RRef",),
}

if TYPE_CHECKING:
    from dure.rpc.backend_registry import BackendType as BackendType

    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.rpc import (
        api as api, backend_registry as backend_registry, constants as constants,
        functions as functions, options as options, rref_proxy as rref_proxy,
    )
    from dure.rpc.api import (
        get_rpc_timeout, get_worker_info, init_rpc, is_available, remote, rpc_async, rpc_sync,
        shutdown,
    )
    from dure.rpc.api import (
        _all_gather as _all_gather,  # pyright: ignore[reportPrivateUsage]
        _barrier as _barrier,  # pyright: ignore[reportPrivateUsage]
        _get_debug_info as _get_debug_info,  # pyright: ignore[reportPrivateUsage]
        _is_current_rpc_agent_set as _is_current_rpc_agent_set,  # pyright: ignore[reportPrivateUsage]
        _rref_context_get_debug_info as _rref_context_get_debug_info,  # pyright: ignore[reportPrivateUsage]
        _set_rpc_timeout as _set_rpc_timeout,  # pyright: ignore[reportPrivateUsage]
        _wait_all as _wait_all,  # pyright: ignore[reportPrivateUsage]
    )
    from dure.rpc.backend_registry import (
        BackendValue, RpcBackendOptions, TensorPipeRpcBackendOptions, backend_registered,
        construct_rpc_backend_options, register_backend,
    )
    from dure.rpc.memory import share
    from dure.rpc.names import WorkerInfo
    from dure.rpc.rref import RRef
    __all__ = [
        "BackendType", "BackendValue", "RRef", "RpcBackendOptions", "TensorPipeRpcBackendOptions",
        "WorkerInfo", "backend_registered", "construct_rpc_backend_options", "get_rpc_timeout",
        "get_worker_info", "init_rpc", "is_available", "register_backend", "remote", "rpc_async",
        "rpc_sync", "share", "shutdown",
    ]
    # isort: on
    # fmt: on
else:
    _names = [*(name for names in _HOMES.values() for name in names), "BackendType"]
    __all__ = [name for name in _names if not name.startswith("_")]
    _get, __dir__ = lazy_names(__name__, _HOMES)

    def __getattr__(name: str) -> Any:
        if name == "BackendType":  # another one after each `register_backend`
            return importlib.import_module("dure.rpc.backend_registry").BackendType
        return _get(name)
