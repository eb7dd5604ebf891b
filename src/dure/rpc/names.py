"""Who takes part: names and ids."""

from __future__ import annotations

import re
from collections.abc import Callable

from dure.errors import PeerLost, RpcError, UsageError

__all__ = ["MAX_NAME_LENGTH", "Directory", "WorkerInfo"]

MAX_NAME_LENGTH = 128


class WorkerInfo:
    """A process that takes part.

    Args:
        name: Unique at any time; letters, digits, `_`, `-` and `:`, fewer than 128.
        id: Unique for good: who comes again under the same name has another.

    Raises:
        RpcError: The name cannot be one.
    """

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int) -> None:
        if not name:
            raise RpcError("worker name must be non-empty")
        if len(name) >= MAX_NAME_LENGTH:
            raise RpcError(f"worker name must be shorter than {MAX_NAME_LENGTH}", seen=name)
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


class Directory:
    """Who is there, and who was.

    Args:
        look: Finds out whether one of that name, or id, has joined meanwhile; None: nobody joins.

    Threads: the caller's lock guards changes.
    """

    def __init__(self, look: Callable[[str | int], None] | None) -> None:
        self._look = look
        self._workers: dict[int, WorkerInfo] = {}
        self._ids: dict[str, int] = {}
        self._dead: dict[int, tuple[WorkerInfo, str]] = {}

    def add(self, worker: WorkerInfo) -> None:
        """Take note of one that joined."""
        self._workers[worker.id] = worker
        self._ids[worker.name] = worker.id

    def remove(self, id: int, how: str) -> WorkerInfo:
        """Take note of one that is gone for good, and how it ended."""
        worker = self._workers.pop(id, None) or WorkerInfo(str(id), id)
        self._dead[id] = worker, how
        return worker

    def all(self) -> list[WorkerInfo]:
        """Return who is there, by id."""
        return [self._workers[id] for id in sorted(self._workers)]

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return who is meant.

        Raises:
            RpcError: Nobody has that name or id.
            PeerLost: It is gone.
            UsageError: It is no name, id or `WorkerInfo`.
        """
        if isinstance(to, WorkerInfo):
            return to
        if not isinstance(to, str | int):
            raise UsageError(
                "a worker is told by its name, its id or its WorkerInfo", op="rpc", seen=repr(to)
            )
        id = self._ids.get(to, -1) if isinstance(to, str) else int(to)
        found = self._workers.get(id)
        if found is None and self._look is not None:
            self._look(to)
            id = self._ids.get(to, -1) if isinstance(to, str) else int(to)
            found = self._workers.get(id)
        if found is None:
            names = ", ".join(sorted(self._ids))
            raise self.lost(id) or RpcError(
                "could not find destination", seen=f"{to!r}", fix=f"There are: {names}."
            )
        return found

    def info(self, id: int) -> WorkerInfo:
        """Return a worker by its id, be it gone."""
        return self._workers.get(id) or self._dead[id][0]

    def lost(self, id: int) -> PeerLost | None:
        """Return the error about one that is gone; None: it is not."""
        if id not in self._dead:
            return None
        worker, how = self._dead[id]
        return PeerLost(
            f"worker {worker.name!r} (id {id}) is gone",
            peer=id,
            exit=how or None,
            op="rpc",
            seen=how,
        )
