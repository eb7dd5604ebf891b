"""torch's path `torch.distributed.rpc`: remote calls and remote references between processes.

    from dure import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
    rpc.shutdown()

A call (`agent`) is packed (`message`) and carried (`transport`: rings and given memory within a
host, sockets beyond), run by a thread of the callee (`workers`) if it may be (`allow`), and
answered. Values stay where they are for as long as somebody refers to them (`references`).

Names are imported when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import Any

from dure.torch_names import attribute

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
_OWNERS = {name: home for home, names in _HOMES.items() for name in names}

_OWNERS["BackendType"] = "dure.rpc.backend_registry"

__all__ = [n for n in _OWNERS if not n.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "BackendType":  # another one after each `register_backend`
        return importlib.import_module("dure.rpc.backend_registry").BackendType
    if name not in _OWNERS:
        return attribute(__name__, name)
    value = getattr(importlib.import_module(_OWNERS[name]), name)
    globals()[name] = value
    return value
