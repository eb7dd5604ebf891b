"""All ranks, or none: what one rank cannot do fails on every rank, with the same error.

Each rank does its part and then tells the others how it went. Without that exchange a rank whose
disk is full would raise and leave, and the others would wait for it, or worse go on and believe in
a checkpoint that is not there. A rank that dies meanwhile is the group's matter (`PeerLost`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dure.comm.objects import all_gather_object
from dure.comm.world import current_world, resolve
from dure.errors import CheckpointError, DureError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks that save and load together: a group, or this process alone where there is none."""

    def __init__(self, group: ProcessGroup | None) -> None:
        named = group is not None or current_world().default is not None
        self._group = resolve(group, "Checkpointer") if named else None
        self.rank = 0 if self._group is None else self._group.rank()
        self.size = 1 if self._group is None else self._group.size()

    def each(self, do: Callable[[], T]) -> list[T]:
        """Call `do` on every rank, and return all ranks' results.

        Raises:
            Exception: The lowest failing rank's, on all ranks; its own keeps its traceback.

        Collective: all ranks must call.
        """
        mine: tuple[T | None, Exception | None]
        try:
            mine = do(), None
        except (DureError, OSError) as e:
            mine = None, e
        except Exception as e:  # of a class that the other ranks may not be able to receive
            error = CheckpointError("an object failed", seen=f"{type(e).__name__}: {e}")
            error.__cause__ = e
            mine = None, error
        outcomes: list[Any] = [mine]
        if self._group is not None and self.size > 1:
            outcomes = [None] * self.size
            all_gather_object(outcomes, mine, self._group)
            outcomes[self.rank] = mine
        for rank, (_, error) in enumerate(outcomes):
            if error is not None:
                error.add_note(f"on rank {rank} of {self.size}")
                raise error
        return [result for result, _ in outcomes]

    def first(self, do: Callable[[], T]) -> T:
        """Call `do` on rank 0 alone, and return its result on all; errors as `each`."""
        return self.each(lambda: do() if self.rank == 0 else None)[0]  # pyright: ignore[reportReturnType]
