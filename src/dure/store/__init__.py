"""Key-value stores, through which the ranks of a job find each other.

The launcher needs the server alone: so what a name brings along is imported when it is first used.

Internal: its public names are those of `dure`, and `JobKey`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.torch_names import lazy_names

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

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.store.base": ("DEFAULT_TIMEOUT", "Store"),
    "dure.store.etcd": ("EtcdStore",),
    "dure.store.file": ("FileStore",),
    "dure.store.memory": ("HashStore",),
    "dure.store.key": ("JobKey",),
    "dure.store.prefix": ("PrefixStore",),
    "dure.store.network": ("TCPStore",),
}

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.store.base import DEFAULT_TIMEOUT, Store
    from dure.store.etcd import EtcdStore
    from dure.store.file import FileStore
    from dure.store.key import JobKey
    from dure.store.memory import HashStore
    from dure.store.network import TCPStore
    from dure.store.prefix import PrefixStore
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
