"""Key-value stores, through which the ranks of a job find each other.

The launcher needs the server alone: so what a name brings along is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.store.base import DEFAULT_TIMEOUT, Store
    from dure.store.etcd import EtcdStore
    from dure.store.file import FileStore
    from dure.store.key import JobKey
    from dure.store.memory import HashStore
    from dure.store.network import TCPStore
    from dure.store.prefix import PrefixStore

__all__ = [
    "DEFAULT_TIMEOUT",
    "EtcdStore",
    "FileStore",
    "HashStore",
    "JobKey",
    "PrefixStore",
    "Store",
    "TCPStore",
]

_HOMES = {
    "DEFAULT_TIMEOUT": "base",
    "EtcdStore": "etcd",
    "FileStore": "file",
    "HashStore": "memory",
    "JobKey": "key",
    "PrefixStore": "prefix",
    "Store": "base",
    "TCPStore": "network",
}


def __getattr__(name: str) -> Any:
    """Import the home of a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dure.store' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dure.store.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
