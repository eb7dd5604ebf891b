"""Key-value stores, through which the ranks of a job find each other."""

from dure.store.base import DEFAULT_TIMEOUT, Store
from dure.store.file import FileStore
from dure.store.key import JobKey
from dure.store.memory import HashStore
from dure.store.network import TCPStore
from dure.store.prefix import PrefixStore

__all__ = [
    "DEFAULT_TIMEOUT",
    "FileStore",
    "HashStore",
    "JobKey",
    "PrefixStore",
    "Store",
    "TCPStore",
]
