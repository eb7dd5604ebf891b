"""The names and ids of workers."""

from __future__ import annotations

import re

from dure.errors import RpcError

__all__ = ["WorkerInfo"]

_TOO_LONG = 128


class WorkerInfo:
    """The name and id of a worker; calls accept it as their callee.

    Args:
        name: Its name, which no other running worker has: fewer than 128 letters, digits, `_`, `-`
            and `:`.
        id: Its id, which is never reused: a process that replaces a dead one has the same name and
            another id.

    Raises:
        RpcError: The name is invalid.

    Example:
        ```python
        other = rpc.get_worker_info(f"worker{1 - rank}")
        assert (other.name, other.id) == (f"worker{1 - rank}", 1 - rank)
        assert rpc.rpc_sync(other, abs, (-1,)) == 1
        ```
    """

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int) -> None:
        if not name:
            raise RpcError("worker name must be non-empty")
        if len(name) >= _TOO_LONG:
            raise RpcError(f"worker name must be shorter than {_TOO_LONG}", seen=name)
        if not re.fullmatch(r"[A-Za-z0-9_:-]+", name):
            raise RpcError("Worker name must match ^[A-Za-z0-9-_:]*$", seen=repr(name))
        self.name, self.id = name, id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return (self.name, self.id) == (other.name, other.id)

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[object, ...]:
        return WorkerInfo, (self.name, self.id)
